"""A session as an HTML file: complete, inert whatever a model or a tool wrote, and alive in a real browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from history import History, made_up_facts
from sqlalchemy import select, update
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.dashboard import session_file
from agentrl.diagnosis import report, sources
from agentrl.domain.schemas import FACTS
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.exports import token_rows
from agentrl.store.tables import interaction_data, interactions
from agentrl.store.training import token_facts

from .token_arrays import arrays_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = (
    "</script><script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\"><svg onload=\"document.title='owned'\">"
    "[link](javascript:document.title='owned') \x1b[31mred\x1b[0m \u202eesrever\u202c {{ 7777 * 7777 }} <!-- "
)


@pytest.fixture
def history(db: Database) -> History:
    made = History(db, seed=1, likeliest=2)
    made.train(1)
    batch = made.batches[1]
    db.transact(token_facts.record, made.run_id, made.epoch, batch.step_id, made_up_facts(batch))
    with db.write() as conn:
        calls = select(interactions.c.id).where(interactions.c.run_id == made.run_id)
        messages = [{"role": HOSTILE, "content": HOSTILE, "reasoning_content": HOSTILE}]
        call = {"id": "1", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
        answer = {"role": "assistant", "content": HOSTILE, "tool_calls": [call]}
        conn.execute(
            update(interaction_data)
            .where(interaction_data.c.interaction_id.in_(calls))
            .values(new_messages=codec.pack_json(messages), answer=codec.pack_json(answer))
        )
    return made


def page_of(history: History, decode: Callable[[Sequence[int]], str] | None = None) -> tuple[str, list[Any]]:
    """The page of a trained session, and its trajectories."""
    session_id = history.batches[1].trajectories[0].session_id
    session, _ = sources.from_store(history.db, session_id)
    rows = history.db.query(token_rows.of_session, session_id)
    return session_file.made(report.make(session, decode), "a run", rows), rows


def data_in(page: str) -> Any:
    return orjson.loads(page.split('id="data">')[1].split("</script>")[0])


def test_the_page_has_every_token_with_its_facts(history: History) -> None:
    page, rows = page_of(history, lambda ids: f"t{ids[0]}")
    data = data_in(page)
    assert [path["trajectory_id"] for path in data["paths"]] == [row["trajectory_id"] for row in rows]
    for path, row in zip(data["paths"], rows, strict=True):
        arrays = arrays_of(path)
        ids = arrays["input_ids"].tolist()
        for name, found in arrays.items():
            np.testing.assert_array_equal(found, row[name])
        assert path["reasons"] == [list(span) for span in row["loss_reasons"]]
        assert {data["texts"][str(one)] for one in ids} == {f"t{one}" for one in ids}
        sampled = [one for one, turn in zip(ids, arrays["turn_ids"].tolist(), strict=True) if turn >= 0]
        assert [ids for call in path["likeliest"] for ids in call["ids"]] == [[one, one + 1] for one in sampled]
        assert {data["texts"][str(one + 1)] for one in sampled} == {f"t{one + 1}" for one in sampled}


def test_what_others_wrote_is_text(history: History) -> None:
    page, _ = page_of(history, lambda ids: HOSTILE)
    for tag in ("<img", "<svg", "<script>document", "\x1b", "\u202e"):
        assert tag not in page, tag
    assert page.count("<script") == page.count("</script>") == 2
    assert "{{ 7777 * 7777 }}" in page
    assert HOSTILE.split("<svg")[0] in unescape(page)
    assert "\\x1b[31mred" in page


def test_the_policy_allows_the_style_and_the_script_of_the_page_and_nothing_else(history: History) -> None:
    page, _ = page_of(history)
    policy = unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (page.split("<style>")[1].split("</style>")[0], page.rsplit("<script>")[1].split("</script>")[0])
    ]
    style, script = digests
    assert policy == f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; base-uri 'none'"
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[str], str]:
    """Opens an address in Chromium; returns the page's elements after its script has run."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium that starts: it is not installed")
    alone = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    argv = [found, *alone, f"--user-data-dir={tmp_path}/profile", "--dump-dom"]

    def dom(address: str) -> str:
        return subprocess.run([*argv, address], capture_output=True, text=True, timeout=300, check=True).stdout

    try:
        dom("about:blank")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no Chromium that starts: {error}")
    return dom


@pytest.mark.long_on("postgresql")
def test_a_browser_shows_the_tokens_and_runs_nothing_of_what_others_wrote(
    history: History, tmp_path: Path, browse: Callable[[str], str]
) -> None:
    page, rows = page_of(history, lambda ids: HOSTILE if ids[0] == 3 else f"t{ids[0]} ")
    (tmp_path / "page.html").write_text(page)
    dom = browse((tmp_path / "page.html").as_uri())
    assert "<title>session" in dom
    assert "owned</title>" not in dom
    shown = re.findall(r'<span class="token [^"]*" data-i="(\d+)">', dom)
    assert len(shown) == len(rows[0]["input_ids"])
    assert dom.count("<option") == len(rows) + 6 + len(FACTS)
    assert len(re.findall(r"<dt>likeliest \d</dt>", dom)) == 2  # of the first sampled token, which is chosen
    assert 'class="k' in dom  # the legend of the reasons


@pytest.mark.long_on("postgresql")
def test_the_doctor_writes_the_page(history: History, tmp_path: Path) -> None:
    session_id = history.batches[1].trajectories[0].session_id
    url = str(history.db.url)
    argv = ["doctor", "--session", session_id, "--run", "test", "--database-url", url]
    found = CliRunner().invoke(app, [*argv, "--html", str(tmp_path / "page.html")])
    assert found.exit_code in (0, 1), found.output
    assert len(data_in((tmp_path / "page.html").read_text())["paths"]) >= 1
    nowhere = CliRunner().invoke(app, [*argv, "--html", str(tmp_path / "no" / "page.html")])
    assert "cannot be written" in str(nowhere.exception)
    assert not (tmp_path / "no").exists()


def test_html_needs_a_session(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", "--html", str(tmp_path / "page.html"), "--", "true"])
    assert "--html: needs --session ID" in str(found.exception)

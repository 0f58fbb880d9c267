"""The text of a run's trajectories: each ended group has one whole file, whenever the writer is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from databases import KINDS, Databases
from history import LIMITS, History
from sqlalchemy import select
from tokenizers import Tokenizer

from agentrl.domain.schemas import SessionStatus
from agentrl.export import trajectory_log
from agentrl.export.areal_dump import tokenizer
from agentrl.export.trajectory_log import NoRoom, TrajectoryLog
from agentrl.store import Database
from agentrl.store.calls import call_traces
from agentrl.store.db import codec
from agentrl.store.exports import ended_groups
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import groups, sessions

WRITER = """
import sys
from pathlib import Path
from agentrl.export.areal_dump import tokenizer
from agentrl.export.trajectory_log import TrajectoryLog
from agentrl.store import Database

url, run_id, folder, model = sys.argv[1:]
log = TrajectoryLog(Database(url), run_id, Path(folder), tokenizer(Path(model)), print)
print("ready", flush=True)
log.catch_up()
"""


@pytest.fixture(params=KINDS)
def url(databases: Databases, request: pytest.FixtureRequest) -> Iterator[str]:
    with databases.lent(request.param) as lent:
        yield lent


@pytest.fixture
def history(url: str, tiny_model: Path) -> Iterator[History]:
    """A run with trained, ready, failed and evaluated groups, and another run beside it."""
    database = Database(url)
    History(database, name="other", seed=9).group()
    made = History(database, seed=1, base_model=str(tiny_model))
    made.train(2)
    made.group(versions=[0, 1, 2])
    made.rejected()
    made.group(reward=False)
    made.evaluation()
    yield made
    database.close()


@pytest.fixture
def log(history: History, tmp_path: Path, tiny_model: Path) -> Callable[..., TrajectoryLog]:
    def make(folder: str = "run", note: Callable[[str], None] = print) -> TrajectoryLog:
        (tmp_path / folder).mkdir(exist_ok=True)
        return TrajectoryLog(history.db, history.run_id, tmp_path / folder, tokenizer(tiny_model), note)

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def ended(history: History) -> dict[str, bool]:
    """Ended group → whether it is an evaluation's."""
    with history.db.read() as conn:
        of_run = (groups.c.run_id == history.run_id, groups.c.state != "running")
        return {row.id: row.is_eval for row in conn.execute(select(groups.c.id, groups.c.is_eval).where(*of_run))}


def recorded(history: History, session_id: str, model: Path) -> list[tuple[Any, ...]]:
    """What the trace says of a session's sequences, as a line would."""
    decode = Tokenizer.from_file(str(model / "tokenizer.json")).decode
    with history.db.read() as conn:
        calls = {call["id"]: call for call in call_traces.trace(conn, session_id)}
    found = []
    for leaf in calls.keys() - {call["parent_id"] for call in calls.values()}:
        path = [calls[leaf]]
        while path[0]["parent_id"] is not None:
            path.insert(0, calls[path[0]["parent_id"]])
        ids = [token for call in path for token in (*call["prompt_delta_ids"], *call["output_ids"])]
        first = len(path[0]["prompt_delta_ids"])
        versions = [version for call in path for version, _, _ in call["version_spans"]]
        texts = [decode(part, skip_special_tokens=False) for part in (ids[:first], ids[first:])]
        found.append((len(ids), first, versions[0], versions[-1], *texts))
    return sorted(found)


def test_each_ended_group_has_the_exact_text_of_its_sessions(history, log, tmp_path, tiny_model) -> None:
    assert log().catch_up() == len(ended(history))
    files = contents(tmp_path / "run")
    assert {Path(name).stem: name.startswith("eval-rollout/") for name in files} == ended(history)
    names = ("seqlen", "prompt_len", "head_version", "tail_version", "prompt", "completion")
    statuses = set()
    for name, content in files.items():
        _, version, file = Path(name).parts
        lines = [orjson.loads(line) for line in content.splitlines()]
        assert {line["task_id"] for line in lines} == {Path(file).stem}
        by_session: dict[str, list[tuple[Any, ...]]] = {}
        for line in lines:
            by_session.setdefault(line["session_id"], []).append(tuple(line[name] for name in names))
        with history.db.read() as conn:
            of_group = select(sessions).where(sessions.c.group_id == Path(file).stem)
            rows = {row.id: row for row in conn.execute(of_group)}
        assert by_session.keys() == rows.keys()
        for session_id, found in by_session.items():
            assert sorted(found) == recorded(history, session_id, tiny_model)
        assert all(rows[line["session_id"]].status == line["status"] for line in lines)
        assert all(rows[line["session_id"]].sample_index == line["sample_idx"] for line in lines)
        assert int(version) == max(line["tail_version"] for line in lines)
        statuses |= {line["status"] for line in lines}
    assert statuses == {"completed", "failed"}


@pytest.mark.long_on("postgresql")
def test_a_group_is_written_once_and_only_when_it_has_ended(history, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trajectory_log, "PAGE_GROUPS", 2)
    monkeypatch.setattr(trajectory_log, "CLOCK_SLACK_S", 0.0)
    writer = log()
    with history.db.write() as conn:
        running = group_starts.start_group(conn, history.run_id, LIMITS, [codec.new_id() for _ in range(2)])
        for session_id in running.session_ids:
            history.play(conn, session_id)
    later = history.group()
    assert writer.catch_up() == len(ended(history))
    before = contents(tmp_path / "run")
    assert any(later.group_id in name for name in before)
    assert not any(running.group_id in name for name in before)
    assert writer.catch_up() == 0
    with history.db.write() as conn:
        for session_id in running.session_ids:
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, LIMITS)
    newest = history.group()
    assert writer.catch_up() == 2
    assert writer.catch_up() == log().catch_up() == 0
    after = contents(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert {Path(name).stem for name in after.keys() - before.keys()} == {running.group_id, newest.group_id}


@pytest.mark.long_on("postgresql")
def test_a_killed_writer_leaves_whole_files_and_the_next_one_the_rest(history, url, log, tmp_path, tiny_model) -> None:
    for _ in range(30):
        history.group()
    log("reference").catch_up()
    expected = contents(tmp_path / "reference")
    folder = tmp_path / "run"
    folder.mkdir()
    for kill_at in (1, 5, 12):
        arguments = [url, history.run_id, str(folder), str(tiny_model)]
        with subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            while process.poll() is None and len(list(folder.rglob("*.jsonl"))) < kill_at:
                pass
            process.send_signal(signal.SIGKILL)
        found = contents(folder)
        whole = {name: content for name, content in found.items() if not name.endswith(".part")}
        assert whole == {name: expected[name] for name in whole}
    draft = next(folder.rglob("*.jsonl")).parent / ".x.jsonl.0.part"
    draft.write_bytes(b"half")
    missing = len(expected) - len(list(folder.rglob("*.jsonl")))
    assert log().catch_up() == missing
    assert contents(folder) == expected


@pytest.mark.long_on("postgresql")
def test_nothing_is_written_while_the_disk_is_full(history, log, tmp_path, monkeypatch) -> None:
    writer = log()
    monkeypatch.setattr(trajectory_log, "LEAST_FREE_BYTES", 2**62)
    with pytest.raises(NoRoom, match=r"rollout.dump_to_file: .* has less than .* bytes of free space"):
        writer.catch_up()
    assert contents(tmp_path / "run") == {}
    monkeypatch.undo()
    assert writer.catch_up() == len(ended(history))


@pytest.mark.long_on("postgresql")
def test_a_group_that_is_pruned_while_it_is_written_stops_nothing(history, log, tmp_path, monkeypatch) -> None:
    members = ended_groups.members
    monkeypatch.setattr(ended_groups, "members", lambda conn, group_id: ["0" * 32, *members(conn, group_id)])
    assert log().catch_up() == len(ended(history))
    assert all(contents(tmp_path / "run").values())


@pytest.mark.long_on("postgresql")
def test_the_sequences_of_a_session_have_a_limit(history, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trajectory_log, "SESSION_TOKENS", 1)
    notes: list[str] = []
    log(note=notes.append).catch_up()
    lines = [orjson.loads(line) for content in contents(tmp_path / "run").values() for line in content.splitlines()]
    assert len({line["session_id"] for line in lines}) == len(lines)
    assert notes
    assert all("the log has only the first 1 sequences of session" in note for note in notes)

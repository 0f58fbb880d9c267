"""A session as one HTML file that needs nothing else: to look at, or to attach to a bug report.

    the doctor's report ─► verdict, calls and forks, conversation       written here, escaped
    rows of `columns.TOKENS` ─► JSON in the file ─► tokens.js ─► the token view

All text of models, tools and agents is inert: the template escapes it, control and bidirectional characters are spelled
out, the token view sets text only, and the page's Content-Security-Policy allows this file's own style and script, and
nothing from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jinja2
import orjson
from markupsafe import Markup

from agentrl.doctor import forks
from agentrl.doctor.record import Call
from agentrl.doctor.report import Decode, Report, neighbourhood
from agentrl.doctor.show import rows
from agentrl.domain.schemas import FACTS, Json
from agentrl.rendering.messages import text_of
from agentrl.store.db.likeliest_codec import NO_TOKEN
from agentrl.visible import LINES, visible

LONGEST_TEXT = 20_000
"""Characters of a message that the conversation shows."""
ARRAYS = ("input_ids", "turn_ids", "logprobs", "versions", "ages", *FACTS)


def made(report: Report, run_name: str, trajectories: Sequence[Json], at: datetime | None = None) -> str:
    """The page. `trajectories` are rows of `columns.TOKENS`."""
    here = files("agentrl.pages")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("session.css", "tokens.js"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((here / "session.html").read_text(encoding="utf-8"))
    return template.render(
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'",
        data=Markup(_json_in_html(_tokens(trajectories, report.decode))),
        run=visible(run_name),
        session=report.session,
        report=report,
        calls=[_call(call, lead) for call, lead in rows(report.session)],
        forks=[_fork(report, fork) for fork in report.forks],
        rewards=[{name: _shown(value) for name, value in reward.items()} for reward in report.session.rewards],
        trajectories=len(trajectories),
        made_at=(at or datetime.now(UTC)).isoformat(timespec="seconds"),
        shown=_shown,
    )


def _call(call: Call, lead: str) -> Json:
    asked = call.turns[len(call.parent.turns) if call.parent else 0 :]
    system = [] if call.parent else call.system
    return {
        "call": call,
        "depth": len(lead) // 2 - 1,
        "ended": call.finish or call.status if call.status == "complete" else call.status,
        "versions": ", ".join(map(str, call.versions)) or "–",
        "messages": [_message(message) for message in (*system, *asked)],
        "tools": [_shown(orjson.dumps(tool, option=orjson.OPT_INDENT_2).decode()) for tool in call.tools or []]
        if call.parent is None or call.tools != call.parent.tools
        else [],
    }


def _message(message: Json) -> Json:
    calls = message.get("tool_calls") or []
    content = message.get("content")
    if isinstance(content, list):
        text = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    else:
        text = text_of(message)
    return {
        "role": _shown(str(message.get("role", ""))),
        "reasoning": _shown(message.get("reasoning_content") or ""),
        "text": _shown(text),
        "cut": max(0, len(text) - LONGEST_TEXT),
        "calls": [
            {"name": _shown(str(one["function"]["name"])), "arguments": _shown(str(one["function"]["arguments"]))}
            for one in calls
        ],
    }


def _fork(report: Report, fork: forks.Fork) -> Json:
    advised, near = report.advice(fork), neighbourhood(report, fork)
    return {
        "call": fork.call.number,
        "kind": fork.kind.replace("_", " "),
        "cause": ("" if advised.certain else "probably: ") + advised.cause,
        "todo": advised.todo,
        "cost": fork.cost_tokens,
        "theirs": near and near.theirs,
        "ours": near and near.ours,
    }


def _tokens(trajectories: Iterable[Json], decode: Decode | None) -> Json:
    """The data of the token view: the text of each id, and the arrays of each trajectory."""
    used: set[int] = set()
    paths = []
    for row in trajectories:
        used.update(row["input_ids"].tolist())
        likeliest = row["top_logprobs"] or []
        used.update(token for call in likeliest for token in call["ids"].ravel().tolist() if token != NO_TOKEN)
        about = {name: row[name] for name in ("trajectory_id", "state", "reason", "step")}
        spans = {"reasons": row["loss_reasons"], "likeliest": likeliest}
        paths.append(about | spans | {name: row[name] for name in ARRAYS})
    texts = {str(one): visible(decode([one]), "\n") if decode else f"‹{one}› " for one in sorted(used)}
    return {"facts": FACTS, "texts": texts, "paths": paths}


def _shown(value: Any) -> str:
    """Text without control characters but line ends, of bounded length."""
    return visible(str(value)[:LONGEST_TEXT], LINES)


def _json_in_html(value: Json) -> str:
    """JSON that cannot end its script element."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode().replace("<", "\\u003c")


def _hash(source: str) -> str:
    """A source of a Content-Security-Policy: the digest of an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

"""A session as one HTML file that needs nothing else: to look at, or to attach to a bug report.

    the diagnosis ─► verdict, calls and forks, conversation             written here, escaped
    rows of `columns.TOKENS` ─► JSON in the file ─► tokens.js ─► the token view

All text of models, tools and agents is inert: the templates escape it, control and bidirectional characters are spelled
out, the token view sets text only, and the page's Content-Security-Policy allows this file's own style and script, and
nothing from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

import orjson
from markupsafe import Markup

from agentrl.dashboard import session_contents, token_data
from agentrl.dashboard.page_rendering import assets, render
from agentrl.diagnosis.report import Report
from agentrl.domain.schemas import Json


def made(report: Report, run_name: str, trajectories: Sequence[Json], at: datetime | None = None) -> str:
    """The page. `trajectories` are rows of `columns.TOKENS`."""
    files = assets()
    style = "\n".join(files[name].content.decode() for name in ("dashboard.css", "session.css"))
    script = files["tokens.js"].content.decode()
    tree = session_contents.tree(report)
    return render(
        "session_file.html",
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'",
        data=_json_in_html(token_data.of(trajectories, report.decode)),
        run_name=run_name,
        session=report.session,
        report=report,
        tree=tree,
        turns=session_contents.turns(report.session, [one["call"] for one in tree]),
        forks=session_contents.forks_of(report),
        trajectories=len(trajectories),
        made_at=(at or datetime.now(UTC)).isoformat(timespec="seconds"),
    )


def _json_in_html(value: Json) -> Markup:
    """JSON that cannot end its script element."""
    return Markup(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode().replace("<", "\\u003c"))


def _hash(source: str) -> str:
    """A source of a Content-Security-Policy: the digest of an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

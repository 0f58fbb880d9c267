"""`agentrl status`: shows the current state of a run on one screen."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl import trainer_facts
from agentrl.cli.located import DatabaseUrl, Store, connected, find
from agentrl.domain import evaluation
from agentrl.domain.schemas import Json
from agentrl.errors import StoreError, UserError
from agentrl.location import Location
from agentrl.visible import say

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY_S = 2.0
TIMEOUT_S = 10.0
STALE_S = 15.0
"""A replica whose last heartbeat is older is shown as silent, or as ended if the run is over."""
OVER = ("paused", "finished", "failed")
"""Statuses of a run whose processes have ended; a proxy that somebody starts for it again is shown as alive."""


def status(
    ctx: typer.Context,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Name or folder of the run to read from its database.", show_default=False),
    ] = None,
    proxy: Annotated[str | None, typer.Option(envvar="AGENTRL_PROXY_URL", help="URL of the proxy.")] = None,
    run_key: Annotated[str | None, typer.Option("--key", envvar="AGENTRL_RUN_KEY", help="A run or admin key.")] = None,
    admin_key: Annotated[str | None, typer.Option(envvar="AGENTRL_ADMIN_KEY", hidden=True)] = None,
    database_url: DatabaseUrl = None,
    window: Annotated[
        float, typer.Option(min=1, max=600, help="Seconds over which rates and latencies are computed.")
    ] = 60.0,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run's version, step, engines, sessions, calls, tokens, latencies, forks, events and errors.

    The default is the newest run in runs/. --proxy or AGENTRL_PROXY_URL (with AGENTRL_RUN_KEY or AGENTRL_ADMIN_KEY)
    asks the proxy, from any machine. --run and --database-url read the store instead.
    """
    by_option = _on_command_line(ctx, "proxy")
    if by_option and (run or database_url):
        raise UserError("--proxy cannot be combined with --run or --database-url")
    if proxy and (by_option or not (run or database_url)):
        key = run_key or admin_key
        if not key:
            raise UserError("no key: set AGENTRL_RUN_KEY or AGENTRL_ADMIN_KEY")
        address, bearer = proxy.rstrip("/"), key
        ask: Callable[[], Json] = lambda: from_proxy(address, bearer, window)  # noqa: E731
    else:
        found = find(run, database_url)
        ask = lambda: from_store(found, window)  # noqa: E731
    if as_json and not watch:
        return say(json.dumps(ask(), indent=2))
    from agentrl.console import Console

    console = Console()
    if not watch:
        return console.print(screen(ask(), time.time()))
    try:
        if as_json:
            while True:
                say(json.dumps(ask()))
                time.sleep(EVERY_S)
        _follow(console, ask)
    except KeyboardInterrupt:
        return None


def _on_command_line(ctx: typer.Context, option: str) -> bool:
    """Whether an option is on the command line, as opposed to the environment."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _follow(console: Any, ask: Callable[[], Json]) -> None:
    """Refresh the screen until interrupted. Shows an error while the proxy or the database is unavailable."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    found = ask()
    with Live(screen(found, time.time()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_S)
            problem = ""
            try:
                found = ask()
            except (UserError, StoreError) as error:
                problem = str(error)
            shown = screen(found, time.time())
            live.update(Group(shown, Text(problem, style="red")) if problem else shown, refresh=True)


def from_proxy(address: str, key: str, window_s: float) -> Json:
    """Read the status from the proxy. Raises UserError when it does not answer or rejects the key."""
    import httpx

    try:
        answer = httpx.get(
            f"{address}/api/status",
            params={"window_s": window_s},
            timeout=TIMEOUT_S,
            headers={"Authorization": f"Bearer {key}"},
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UserError(f"--proxy {address} is not a valid URL: {error}") from error
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
        raise UserError(f"no proxy answers at {address}: {why}; --run NAME reads the run's database instead") from error
    try:
        found = answer.json()
        if answer.status_code == 200 and "run" in found:
            return dict(found)
        why = found["error"]["message"]
    except (ValueError, KeyError, TypeError):
        why = "not an agentrl proxy"
    raise UserError(f"{address} answered {answer.status_code}: {why}")


def from_store(found: Location, window_s: float) -> Json:
    """Read the status from the store. Raises UserError when the run is missing, StoreError when the store is
    unreadable.
    """
    from agentrl.store import activity

    with connected(found) as database:
        database.require_current()
        return database.query(activity.of_run, Store(database, found).run().id, window_s)


def screen(found: Json, now: float) -> RenderableType:
    """Render `found` for a terminal of at least 80 columns."""
    from rich.console import Group
    from rich.text import Text

    run, calls = found["run"], found["calls"]
    head = Text.assemble(
        (run["name"], "bold"),
        "  ",
        (run["status"], _color(run["status"])),
        f"  step {run['published_step']} of {run['target_steps']}" if run["target_steps"] else "  recording only",
        f"  version {run['version']}",
    )
    if run["error"]:
        head.append(f"\n{_line(run['error'])}", "red")
    parts: list[RenderableType] = [head, Text(), _facts(found), Text(), _parts(found, now)]
    if found["processes"]:
        parts += [Text(), _hosts(found["processes"])]
    if found["evaluations"]:
        parts += [Text(), *(Text(evaluation.line(one)) for one in found["evaluations"])]
    if calls["forks"]:
        parts += [Text(), Text.assemble(("forks  ", "bold"), _counts(calls["forks"]))]
    if found["events"]:
        parts += [Text(), _rows("events", [_event(event, now) for event in found["events"]])]
    if found["errors"]:
        parts += [Text(), _rows("errors", [_error(error, now) for error in found["errors"]])]
    return Group(*parts)


def _facts(found: Json) -> RenderableType:
    from rich.table import Table

    run, calls, sessions, step = found["run"], found["calls"], found["sessions"], found["step"]
    queue = f", {found['commit_queue']} writes queued" if "commit_queue" in found else ""
    rows = [
        ("sessions", f"{sessions['open']} open, {sessions['closing']} closing"),
        (
            "groups",
            f"{run['running_groups']} running, {run['ready_groups']} ready; {run['admitted_groups']} admitted, "
            f"{run['returned_groups']} returned",
        ),
        *([("tasks", f"{run['skipped_tasks']} skipped by the curriculum")] if run["skipped_tasks"] else []),
        ("in flight", f"{found['in_flight']} calls{queue}"),
        (
            f"last {calls['window_s']:g} s",
            f"{_number(calls['per_s'])} calls/s: {_counts(calls['by_status']) or 'none'}",
        ),
        (
            "tokens/s",
            f"{_number(calls['output_tokens_per_s'])} sampled, {_number(calls['prompt_tokens_per_s'])} prompt "
            f"({_number(calls['cached_tokens_per_s'])} cached)",
        ),
        ("latency", f"p50 {_seconds(calls['latency_s']['p50'])}, p95 {_seconds(calls['latency_s']['p95'])}"),
        (
            "first token",
            f"p50 {_seconds(calls['first_token_s']['p50'])}, p95 {_seconds(calls['first_token_s']['p95'])}",
        ),
        ("prompts", f"{calls['bridged']} bridged, {sum(calls['forks'].values())} forked; {calls['retries']} retries"),
    ]
    if step is not None:
        reward = "" if step["return_mean"] is None else f", return {step['return_mean']:.3g}"
        age = "" if step["staleness_max"] is None else f", oldest token {step['staleness_max']} versions"
        rows.append(("newest step", f"{step['step']} ({step['state']}){reward}{age}"))
    if found.get("checkpoint"):
        rows.append(("checkpoint", _checkpoint(found["checkpoint"])))
    if found.get("trainer"):
        rows.append(("trainer", trainer_facts.line(found["trainer"])))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for row in rows:
        table.add_row(*row)
    return table


def _checkpoint(found: Json) -> str:
    """The newest durable checkpoint: its step, digest and size, and where it is complete."""
    where = "on disk and in object storage" if found["stored_at"] is not None else "on disk"
    return f"step {found['step']}, {found['digest'][:12]}, {found['size_bytes'] / 2**20:,.1f} MiB, {where}"


def _parts(found: Json, now: float) -> RenderableType:
    """The table of engines, proxies and workers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    states = [_replica_state(found, replica, now) for replica in found["replicas"]]
    watched = found["run"]["status"] not in OVER or "alive" in states
    for title, options in (("part", {}), ("name", {"overflow": "fold"}), ("state", {}), ("", {"overflow": "fold"})):
        table.add_column(title, **options)  # type: ignore[arg-type]
    for engine in found["engines"]:
        what = "no version" if engine["version"] is None else f"version {engine['version']}"
        what += f", {engine['running']} running" if "running" in engine else ""
        if engine["error"]:
            what = _line(engine["error"])
        state = engine["state"] if watched else f"was {engine['state']}"
        table.add_row("engine", Text(engine["url"]), _state(state), Text(what))
    for replica, state in zip(found["replicas"], states, strict=True):
        last_seen = _does(replica) if state == "alive" else f"last seen {_ago(now - replica['last_seen_at'])}"
        table.add_row(replica["kind"], Text(replica["name"]), _state(state), Text(last_seen))
    if not found["engines"]:
        table.add_row("engine", "none registered", "", "")
    return table


def _hosts(processes: list[Json]) -> RenderableType:
    """The table of the processes that a scheduler has placed, by host."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("host", "process", "state", ""):
        table.add_column(title, overflow="fold")
    shown = None
    for process in sorted(processes, key=lambda process: (process["host"], process["part"], process["rank"])):
        host = "" if process["host"] == shown else process["host"]
        shown = process["host"]
        starts = f"{process['starts']} starts" if process["starts"] > 1 else ""
        table.add_row(Text(host), Text(f"{process['part']}/{process['rank']}"), _state(process["state"]), starts)
    return table


def _replica_state(found: Json, replica: Json, now: float) -> str:
    """`alive`, `silent`, or `ended`: a replica of a run that is over, and not seen since the run stopped."""
    over = found["run"]["status"] in OVER
    stopped_at = max((event["created_at"] for event in found["events"] if event["kind"] == "stopped"), default=0.0)
    if (replica.get("about") or {}).get("ended"):
        return "ended"
    if now - replica["last_seen_at"] <= STALE_S and not (over and replica["last_seen_at"] <= stopped_at):
        return "alive"
    return "ended" if over else "silent"


def _does(replica: Json) -> str:
    """A proxy's or worker's description of itself: its host and its work."""
    about = replica.get("about") or {}
    parts = [f"on {about['host']}"] if about.get("host") else []
    parts += [f"watches {about['watches']} engines"] if "watches" in about else []
    parts += [f"{about[what]} {what}" for what in ("calls", "sessions") if what in about]
    return ", ".join(parts)


def _rows(title: str, rows: list[tuple[str, str, str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, header in enumerate((title, "")):
        table.add_column(header, no_wrap=True, min_width=max(len(row[index]) for row in rows))
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _event(event: Json, now: float) -> tuple[str, str, str]:
    data = ", ".join(f"{name} {_short(value)}" for name, value in event["data"].items() if name not in ("start", "end"))
    return _ago(now - event["created_at"]), event["kind"], data


def _error(error: Json, now: float) -> tuple[str, str, str]:
    return _ago(now - error["created_at"]), error["status"], f"{error['id']}: {_line(error['error'])}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _line(text: str) -> str:
    return " ".join(text.split())


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.3g} s"


def _ago(seconds: float) -> str:
    seconds = max(0, math.floor(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _state(state: str) -> RenderableType:
    from rich.text import Text

    return Text(state, style=_color(state))


def _color(state: str) -> str:
    if state == "ended" or state.startswith("was "):
        return "dim"
    colors = {"dead": "red", "failed": "red", "silent": "red", "lost": "red", "updating": "yellow", "paused": "yellow"}
    return colors.get(state, "green")

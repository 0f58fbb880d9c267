"""`agentrl doctor`: shows a session's token tree and its forks, and whether an agent can be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.errors import UserError, root_cause
from agentrl.visible import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.diagnosis.report import Report
    from agentrl.doctor.trial import Episode
    from agentrl.store import Database

STOPPED = 130


def doctor(
    command: Annotated[list[str] | None, typer.Argument(help="After `--`: a program that runs one episode.")] = None,
    session: Annotated[str | None, typer.Option("--session", help="Id of a recorded session to examine.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Name or folder of --session's run; default: the newest in runs/.")
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url",
            "--database",
            help="URL of --session's store; default: AGENTRL_DATABASE_URL, else that of the run.",
            show_default=False,
        ),
    ] = None,
    proxy: Annotated[str | None, typer.Option("--proxy", help="URL of a proxy to use; default: start one.")] = None,
    key: Annotated[
        str | None, typer.Option("--key", envvar="AGENTRL_RUN_KEY", help="Run key for --proxy.", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="Model of the started engine: tiny, smollm2 or a Hugging Face folder.")
    ] = "tiny",
    storage: Annotated[
        str | None,
        typer.Option("--storage", help="URL of an object storage to try, as in `storage.url`.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Also write --session as one HTML file, with its tokens.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; the program's output goes to stderr.")] = False,
) -> None:
    """Show a session's token tree, its forks, and whether it can be trained: `--session ID` or `-- COMMAND …`.

    With `--storage URL`, write, read, list and delete an object there instead.

    COMMAND runs one episode, with OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and AGENTRL_…
    set. Exit status: 0 trainable; 1 not trainable, or with problems; 2 invalid arguments; 130 stopped.
    """
    if [session is not None, storage is not None, bool(command)].count(True) != 1:
        raise UserError("give one of --session ID, --storage URL and -- COMMAND")
    if html is not None and session is None:
        raise UserError("--html: needs --session ID")
    if storage is not None:
        _try_storage(storage)
        return
    if session is not None:
        report = _examine(session, run, database_url, html)
    else:
        assert command
        report = _play(command, proxy, key, model, as_json=as_json)

    from agentrl.diagnosis.report import as_json as to_json
    from agentrl.diagnosis.verdict import Answer

    if as_json:
        say(json.dumps(to_json(report), indent=2))
    else:
        from agentrl.console import report_console
        from agentrl.doctor.show import show

        show(report, report_console())
        if session is not None:
            say(f"page: agentrl ui {_where(run, database_url)}--session {session}")
    raise typer.Exit(0 if report.verdict.answer is Answer.TRAINABLE else 1)


def _where(run: str | None, database_url: str | None) -> str:
    """The arguments of `agentrl ui` that name the same database."""
    from agentrl.environment import without_password

    given = [run, f"--database-url {without_password(database_url)}" if database_url else None]
    return "".join(f"{one} " for one in given if one)


def _try_storage(url: str) -> None:
    from agentrl.configs.publish_config import storage_url
    from agentrl.storage.object_store import ObjectStore
    from agentrl.storage.storage_probe import probe

    try:
        url = storage_url(url)
    except ValueError as error:
        raise UserError(f"--storage: {error}") from None
    probe(ObjectStore(url))
    say(f"{url}: an object was written, read, listed and deleted")


def _examine(session_id: str, run: str | None, database_url: str | None, html: Path | None) -> Report:
    from agentrl.cli.located import opened
    from agentrl.diagnosis import report, sources

    with opened(run, database_url) as store:
        session, base_model = sources.from_store(store.database, session_id)
        made = report.make(session, sources.decoder(base_model))
        if html is not None:
            _write_page(html, store.database, made)
    return made


def _write_page(path: Path, database: Database, report: Report) -> None:
    from agentrl.dashboard import session_file
    from agentrl.files import atomic_file
    from agentrl.store import runs
    from agentrl.store.exports import token_rows
    from agentrl.store.sessions import session_lookup

    session_id = report.session.id
    run = database.query(runs.get, database.query(session_lookup.run_of, session_id))
    page = session_file.made(report, run.name, database.query(token_rows.of_session, session_id))
    try:
        with atomic_file(path) as draft:
            draft.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html: {path} cannot be written: {error.strerror}") from error
    say(f"wrote {path}", err=True)


def _play(command: Sequence[str], proxy: str | None, key: str | None, model: str, *, as_json: bool) -> Report:
    import asyncio
    import signal

    from agentrl.diagnosis import report, sources
    from agentrl.rollout.command import check

    check(command)

    async def main() -> tuple[Episode, str | None]:
        playing = asyncio.current_task()
        assert playing is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
        stdout = 2 if as_json else None
        if proxy is not None:
            return await _against(command, proxy, key, stdout)
        return await _against_own(command, model, stdout)

    try:
        episode, base_model = asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("stopped: the command and the processes started for it have ended", err=True)
        raise typer.Exit(STOPPED) from None
    return report.make(episode.session, sources.decoder(base_model), episode.status)


async def _against(command: Sequence[str], url: str, key: str | None, stdout: int | None) -> tuple[Episode, str | None]:
    """Run the command against an existing proxy. Abandons the session afterwards, so that the run does not train it."""
    from agentrl.client import AsyncClient
    from agentrl.doctor.trial import play

    if key is None:
        raise UserError("--proxy needs the run's key: give --key or set AGENTRL_RUN_KEY")
    async with AsyncClient(url, key, timeout_s=10) as client:
        run = await client.request("GET", "/api/run")
    return await play(command, url, key, keep=False, stdout=stdout), run["base_model"]


async def _against_own(command: Sequence[str], model: str, stdout: int | None) -> tuple[Episode, str | None]:
    """Run the command against a temporary engine and proxy."""
    from rich.text import Text

    from agentrl.console import Console
    from agentrl.doctor.temporary import place
    from agentrl.doctor.trial import play
    from agentrl.models import resolve_model

    console = Console(stderr=True)
    with console.status(Text(f"preparing model {model}")) as status:
        folder = resolve_model(model)

        def progress(elapsed_s: float, line: str) -> None:
            text = f"starting SGLang: {elapsed_s:.0f} s"
            shown = line[: max(0, console.width - len(text) - 8)]
            status.update(Text.assemble(f"{text}  ", (shown, "dim")))

        try:
            async with place(folder, progress) as where:
                status.stop()
                console.print(f"running {' '.join(command)}", style="dim", soft_wrap=True)
                return await play(command, where.url, where.key, keep=True, stdout=stdout), where.model
        except BaseExceptionGroup as group:
            raise root_cause(group) from group

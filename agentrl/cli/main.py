"""The `agentrl` command. Heavy imports live inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import sys
from typing import Any

import typer

from agentrl.cli import (
    db,
    demo,
    doctor,
    engine,
    export,
    key,
    model,
    proxy,
    replay,
    rollout,
    run,
    status,
    store,
    train,
    trainer,
    tune,
)
from agentrl.errors import AgentRLError
from agentrl.version import __version__
from agentrl.visible import say

app = typer.Typer(
    name="agentrl",
    help="Train any LLM agent: record it through an OpenAI-compatible proxy, learn from its rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        say(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


app.add_typer(db.db, name="db")
app.add_typer(key.key, name="key")
app.add_typer(run.run, name="run")
app.add_typer(store.store, name="store")
app.command("doctor")(doctor.doctor)
app.command("engine")(engine.engine)
app.command("model")(model.model)
app.command("export")(export.export)
app.command("proxy")(proxy.proxy)
app.command("replay")(replay.replay)
app.command("rollout")(rollout.rollout)
app.command("status")(status.status)
app.command("train")(train.train)
app.command("trainer")(trainer.trainer)
app.command("sft")(tune.sft)
app.command("dpo")(tune.dpo)
app.command("reward-model")(tune.reward_model)
app.command("demo")(demo.demo)


def main() -> None:
    """Entry point: errors that we raise on purpose, and mistakes in the arguments, become one line and status 2."""
    try:
        sys.exit(app(prog_name="agentrl", standalone_mode=False))
    except AgentRLError as error:
        say(f"agentrl: {error}", err=True)
        sys.exit(2)
    except typer.Abort:
        say("agentrl: aborted", err=True)
        sys.exit(1)
    except _Mistake as error:
        if line := _line(error):
            say(f"agentrl: {line}", err=True)
        sys.exit(2)


# Of whichever click typer brings: it names none but the last of the line.
_Mistake: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _line(error: Any) -> str:
    """What is wrong with the arguments; nothing where there were none at all, because the help has been shown."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    said = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{said[:1].lower()}{said[1:]}{f'; see {context.command_path} --help' if context else ''}"

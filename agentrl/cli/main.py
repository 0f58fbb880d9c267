"""The `agentrl` command. Commands import heavy modules themselves, so that `--help` is fast."""

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
    logs,
    model,
    plan,
    proxy,
    render,
    replay,
    rollout,
    run,
    scorer,
    spans,
    status,
    store,
    task,
    timeline,
    train,
    trainer,
    try_reward,
    tune,
    ui,
)
from agentrl.errors import AgentRLError
from agentrl.version import __version__
from agentrl.visible import say

app = typer.Typer(
    name="agentrl",
    help="Train any LLM agent: record its calls through an OpenAI-compatible proxy and learn from its rewards.",
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
app.add_typer(engine.commands, name="engine")
app.add_typer(key.key, name="key")
app.add_typer(render.render, name="render")
app.add_typer(run.run, name="run")
app.add_typer(store.store, name="store")
app.command("doctor")(doctor.doctor)
app.command("logs")(logs.logs)
app.command("model")(model.model)
app.command("export")(export.export)
app.command("timeline")(timeline.timeline)
app.command("ui")(ui.ui)
app.command("proxy")(proxy.proxy)
app.command("replay")(replay.replay)
app.command("rollout")(rollout.rollout)
app.command("spans")(spans.spans)
app.command("status")(status.status)
app.command("train")(train.train)
app.command("task")(task.task)
app.command("plan")(plan.plan)
app.command("trainer")(trainer.trainer)
app.command("sft")(tune.sft)
app.command("dpo")(tune.dpo)
app.command("reward-model")(tune.reward_model)
app.command("try-reward")(try_reward.try_reward)
app.command("scorer")(scorer.scorer)
app.command("demo")(demo.demo)


def main() -> None:
    """Entry point. AgentRLError and invalid arguments are printed as one line, with exit status 2."""
    try:
        sys.exit(app(prog_name="agentrl", standalone_mode=False))
    except AgentRLError as error:
        say(f"agentrl: {error}", err=True)
        sys.exit(2)
    except typer.Abort:
        say("agentrl: aborted", err=True)
        sys.exit(1)
    except _UsageError as error:
        if line := _line(error):
            say(f"agentrl: {line}", err=True)
        sys.exit(2)


# The base class of typer's usage errors, which typer does not export.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _line(error: Any) -> str:
    """The message of a usage error; empty for a call without arguments, which has printed the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message[:1].lower()}{message[1:]}{f'; see {context.command_path} --help' if context else ''}"

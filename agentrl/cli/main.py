"""The `agentrl` command. Heavy imports live inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import sys

import typer

from agentrl import __version__
from agentrl.cli import db, demo, doctor, engine, export, model, proxy, replay, rollout, store, train, trainer
from agentrl.errors import AgentRLError

app = typer.Typer(
    name="agentrl",
    help="Train any LLM agent: record it through an OpenAI-compatible proxy, learn from its rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


app.add_typer(db.db, name="db")
app.add_typer(store.store, name="store")
app.command("doctor")(doctor.doctor)
app.command("engine")(engine.engine)
app.command("model")(model.model)
app.command("export")(export.export)
app.command("proxy")(proxy.proxy)
app.command("replay")(replay.replay)
app.command("rollout")(rollout.rollout)
app.command("train")(train.train)
app.command("trainer")(trainer.trainer)
app.command("demo")(demo.demo)


def main() -> None:
    """Entry point: errors that we raise on purpose become one line on stderr and exit status 2."""
    try:
        app()
    except AgentRLError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        sys.exit(2)

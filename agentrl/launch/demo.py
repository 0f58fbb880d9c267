"""The packaged runs, and the page that shows what a run learned: table, curve, transcripts, files."""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection

from agentrl.config import RunConfig, load_config
from agentrl.launch import curve, folder, summary
from agentrl.schemas import Json
from agentrl.store import Database, interactions, runs, sessions

SAMPLES = 3


def run_demo(*, quick: bool, seed: int, runs_dir: Path, overrides: list[str], console: Console) -> None:
    """Run a packaged config to its end and show the result. A stopped demo goes on; a finished one starts anew."""
    from agentrl.launch.train import train

    with as_file(files("agentrl.agents") / ("demo-quick.yaml" if quick else "demo.yaml")) as path:
        config = load_config(path, [*overrides, f"seed={seed}", f"runs_dir={json.dumps(str(runs_dir))}"])
    config = config.model_copy(update={"name": free_name(config.name, seed, runs_dir)})
    console.print(f"run {config.run_dir}: {config.model}, {config.steps} steps; Ctrl-C stops, the same command resumes")
    show_results(config, train(config, console), console)


def free_name(base: str, seed: int, runs_dir: Path) -> str:
    """`base`, with the seed when it is not 0; numbered when runs of that name are finished."""
    name = base if seed == 0 else f"{base}-seed{seed}"
    number, candidate = 1, name
    while (runs_dir / candidate / "summary.json").exists():
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def show_results(config: RunConfig, result: Json, console: Console) -> None:
    """Print what a finished run learned and where its files are."""
    if any(result["evaluations"].values()):
        console.print(before_after(result))
    if len(result["rewards"]) > 1:
        console.print(curve.as_text(result["rewards"]), markup=False, highlight=False)
    database = Database(folder.database_url(config))
    try:
        with database.read() as conn:
            for text in transcripts(conn, runs.by_name(conn, config.name).id):
                console.print(text, markup=False, highlight=False, soft_wrap=True)
    finally:
        database.close()
    mismatch = result["logprob_mismatch_mean_abs"]
    console.print(
        f"{result['steps']} steps in {result['wall_s']:.0f} s, {result['trajectories_trained']} trajectories, "
        f"{result['tokens_trained']} tokens trained, at most {result['max_staleness_seen']} version(s) old"
        + (f"; engine and trainer differ by {mismatch:.1e} nats a token" if mismatch is not None else ""),
        highlight=False,
        soft_wrap=True,
    )
    for name in ("summary.json", "curve.png", "agentrl.db", "config.yaml", "model", "logs"):
        if (config.run_dir / name).exists():
            console.print(f"  {config.run_dir / name}", highlight=False, soft_wrap=True)


def before_after(result: Json) -> Table:
    """Held-out results before and after, one row per setting."""
    table = Table("held-out tasks", "before", "after", "gain", "perfect before", "perfect after")
    for setting in summary.marks(result):
        before, after = (result["evaluations"][when].get(setting) for when in ("before", "after"))
        if before and after:
            table.add_row(
                f"{setting} ({after['tasks']})",
                f"{before['reward']:.3f}",
                f"{after['reward']:.3f}",
                f"{after['reward'] - before['reward']:+.3f}",
                f"{before['perfect']:.0%}",
                f"{after['perfect']:.0%}",
            )
    return table


def transcripts(conn: Connection, run_id: str) -> list[str]:
    """The first held-out tasks as the model played them before and after."""
    played = {
        (row["index"], row["eval"]): row
        for row in sessions.evaluations(conn, run_id)
        if row.get("setting") == summary.MAIN_SETTING
    }
    texts = []
    for index in range(SAMPLES):
        for when in ("before", "after"):
            if (row := played.get((index, when))) is not None:
                lines = conversation(interactions.trace(conn, row["session_id"]))
                texts.append("\n".join([f"── task {index}, {when}: reward {row['reward']:g}", *lines]))
    return texts


def conversation(calls: list[Json]) -> list[str]:
    """A session's messages, one line each, from the last question of its first prompt on."""
    lines: list[str] = []
    for number, call in enumerate(calls):
        messages = call["new_messages"]
        if number == 0:
            users = [i for i, message in enumerate(messages) if message["role"] == "user"]
            messages = messages[users[-1] :] if users else messages
        lines += [_line(message) for message in [*messages, call["answer"]]]
    return lines


def _line(message: Json) -> str:
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
    text = " ".join([str(message.get("content") or ""), *calls]).strip()
    return f"   {message['role']:>9}: {text!r}" if not calls else f"   {message['role']:>9}: {text}"

"""The packaged demo runs, and the report of a finished run: table, curve, transcripts, files."""

from __future__ import annotations

import json
import shlex
from importlib.resources import as_file, files
from pathlib import Path

from rich.table import Table

from agentrl.configs.config_files import load_config
from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.domain.evaluation import Label, figure
from agentrl.domain.schemas import Json
from agentrl.launch import run_folder
from agentrl.launch.views import curve, summary
from agentrl.location import RUNS_DIR
from agentrl.store import Connection, Database, evaluation_episodes, runs
from agentrl.store.calls import call_traces

SAMPLES = 3


def run_demo(*, quick: bool, seed: int, runs_dir: Path, overrides: list[str], console: Console) -> None:
    """Run a packaged config to its end and show the result. Resumes a stopped demo; restarts a finished one."""
    from agentrl.launch.local_run import train

    with as_file(files("agentrl.agents") / ("demo-quick.yaml" if quick else "demo.yaml")) as path:
        config = load_config(path, [*overrides, f"seed={seed}", f"runs_dir={json.dumps(str(runs_dir))}"])
    config = config.model_copy(update={"name": free_name(config.name, seed, runs_dir)})
    console.print(f"run {config.run_dir}: {config.model}, {config.steps} steps; Ctrl-C stops, the same command resumes")
    show_results(config, train(config, console), console)


def free_name(base: str, seed: int, runs_dir: Path) -> str:
    """A name that no finished run has: `base`, with the seed when it is not 0, and a number if needed."""
    name = base if seed == 0 else f"{base}-seed{seed}"
    number, candidate = 1, name
    while (runs_dir / candidate / "summary.json").exists():
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def show_results(config: RunConfig, result: Json, console: Console) -> None:
    """Print a finished run's results and the paths of its files."""
    if result["gains"]:
        console.print(before_after(result))
    if len(result["rewards"]) > 1:
        console.print(curve.as_text(result["rewards"]))
    database = Database(run_folder.database_url(config))
    try:
        with database.read() as conn:
            for text in transcripts(conn, runs.by_name(conn, config.name).id, config.evaluation.main_setting):
                console.print(text, soft_wrap=True)
    finally:
        database.close()
    mismatch = result["logprob_mismatch_mean_abs"]
    console.print(
        f"{result['steps']} steps in {result['wall_s']:.0f} s, {result['trajectories_trained']} trajectories, "
        f"{result['tokens_trained']} tokens trained, at most {result['max_staleness_seen']} version(s) old"
        + (f"; engine and trainer differ by {mismatch:.1e} nats a token" if mismatch is not None else ""),
        soft_wrap=True,
    )
    for name in ("summary.json", "curve.png", "agentrl.db", "config.yaml", "model", "logs"):
        if (config.run_dir / name).exists():
            console.print(f"  {config.run_dir / name}", soft_wrap=True)
    console.print("inspect it:", *(f"  {command}" for command in next_commands(config)), sep="\n", soft_wrap=True)


def next_commands(config: RunConfig) -> list[str]:
    """Commands that inspect a finished run, for the current folder."""
    run = config.name if config.runs_dir == RUNS_DIR else str(config.run_dir)
    run = shlex.quote(run)
    return [
        f"agentrl status --run {run}",
        f"agentrl replay --run {run} --steps 1..",
        f"agentrl export --run {run} --out data/",
    ]


def before_after(result: Json) -> Table:
    """Held-out results before the first step and after the last, with 95 % intervals; one row per setting."""
    before, *_, after = (found for found in result["evaluations"] if found["complete"])
    table = Table("held-out tasks", "before", "after", "gain", "perfect before", "perfect after")
    for name, gain in result["gains"].items():
        old, new = before["settings"][name], after["settings"][name]
        table.add_row(
            f"{name} ({new['tasks']})",
            figure(old),
            figure(new),
            figure(gain, "+.3f"),
            f"{old['perfect']:.0%}",
            f"{new['perfect']:.0%}",
        )
    return table


def transcripts(conn: Connection, run_id: str, setting: str) -> list[str]:
    """The first held-out tasks, as played before the first step and after the last."""
    ends = [found for found in summary.ends(evaluation_episodes.of_run(conn, run_id)) if found is not None]
    played: dict[tuple[int, int], Json] = {}
    for found in ends:
        for row in evaluation_episodes.episodes(conn, run_id, version=found.version):
            label = Label.of(row)
            if label is not None and (label.episode.setting, label.episode.sample) == (setting, 0):
                played[label.episode.index, label.step] = row
    texts = []
    for index in range(SAMPLES):
        for found in ends:
            if (index, found.step) in played:
                row = played[index, found.step]
                lines = conversation(call_traces.trace(conn, row["session_id"]))
                texts.append("\n".join([f"── task {index}, step {found.step}: reward {row['reward']:g}", *lines]))
    return texts


def conversation(calls: list[Json]) -> list[str]:
    """A session's messages, one line each, starting at the last user message of its first prompt."""
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

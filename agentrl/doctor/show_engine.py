"""Prints the report on an engine to a terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from agentrl.console import Console
from agentrl.doctor.engine_examination import EngineReport
from agentrl.doctor.engine_probe import Probe
from agentrl.doctor.show import hanging


def show_engine(report: EngineReport, console: Console) -> None:
    """Print what the engine is, what it can do and what it lacks, and the verdict."""
    state = "" if report.health is None else f" · {report.health}"
    console.print(Text.assemble((report.url, "bold"), state))
    if report.backend is not None:
        console.print(_facts(report))
        console.print()
        console.print(_capabilities(report))
    console.print()
    word, colour = ("ready for training", "green") if report.ready else ("not ready for training", "red")
    console.print(Text(word, style=f"bold {colour}"))
    for line, mark in [*((p, "✗") for p in report.problems), *((n, "·") for n in report.notes)]:
        console.print(hanging(mark, line))


def _facts(report: EngineReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    key = {True: "required", False: "not required", None: "unknown"}[report.requires_key]
    context = "unknown" if report.context_tokens is None else f"{report.context_tokens:,} tokens"
    table.add_row("server", f"{report.title} {report.release} (supported: {report.supported})")
    table.add_row("key", key)
    table.add_row("model", report.model or "unknown")
    table.add_row("weights", f"label {report.label!r}" if report.version is None else f"version {report.version}")
    table.add_row("context", context)
    table.add_row("sampled", "nothing" if report.probe is None else _sampled(report.probe))
    return table


def _sampled(probe: Probe) -> str:
    logprobs = ", ".join(f"{logprob:.3f}" for logprob in probe.logprobs)
    spans = ", ".join(f"version {version}: {start} to {end}" for version, start, end in probe.spans)
    return f"ids {', '.join(map(str, probe.ids))}; logprobs {logprobs}; {spans}"


def _capabilities(report: EngineReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for capability in report.capabilities:
        table.add_row("✓", capability, "")
    for lack in report.lacks:
        option = "" if lack.option is None else f"; to have it, start it {lack.option}"
        table.add_row("–", lack.capability, f"{lack.effect}{option}")
    return table

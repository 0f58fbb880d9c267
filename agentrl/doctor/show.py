"""Prints the report to a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentrl.console import Console
from agentrl.diagnosis.forks import Fork
from agentrl.diagnosis.record import Session
from agentrl.diagnosis.report import Report, neighbourhood
from agentrl.diagnosis.tree_rows import rows
from agentrl.diagnosis.verdict import Answer
from agentrl.diagnosis.words import count, some
from agentrl.domain.schemas import ForkReason

MOST_ALIKE = 3
"""Forks of a kind to show in full."""
MOST_CALLS = 100
"""Maximum rows of the tree."""
MOST_SUBAGENTS = 5
"""Sub-agent sessions to show."""
COLOURS = {Answer.TRAINABLE: "green", Answer.WITH_PROBLEMS: "yellow", Answer.NOT_TRAINABLE: "red"}


def show(report: Report, console: Console) -> None:
    """Print the tree, the forks and the summary of the session and its sub-agents, and the verdict on all of them."""
    _show_session(report, console)
    for subagent in report.subagents[:MOST_SUBAGENTS]:
        console.print()
        show(subagent, console)
    if len(report.subagents) > MOST_SUBAGENTS:
        console.print(f"\n… {count(len(report.subagents) - MOST_SUBAGENTS, 'more sub-agent')}; --json has them all")
    _show_verdict(report, console)


def _show_session(report: Report, console: Console) -> None:
    session = report.session
    state = f"{session.status}{', an evaluation' if session.is_eval else ''}"
    console.print(Text.assemble((session.title, "bold"), f" · {state} · {_rewards(session)}"))
    if session.calls:
        console.print(tree(report))
        if len(session.calls) > MOST_CALLS:
            console.print(f"… {count(len(session.calls) - MOST_CALLS, 'more call')}; --json has them all")
    for forks in alike(report.forks):
        _show_alike(report, forks, console)
    if session.calls:
        console.print()
        console.print(summary(report))


def _show_verdict(report: Report, console: Console) -> None:
    verdict = report.verdict
    console.print()
    if report.command_status is not None:
        console.print(f"the command ended with exit status {report.command_status}")
    scope = "with its sub-agents: " if report.subagents else ""
    console.print(Text.assemble(scope, (verdict.answer.value, f"bold {COLOURS[verdict.answer]}")))
    for line, mark in [*((p, "✗") for p in verdict.problems), *((n, "·") for n in verdict.notes)]:
        console.print(Padding(hanging(mark, line), (0, 0, 0, 1), expand=False))


def alike(forks: Sequence[Fork]) -> list[list[Fork]]:
    """Group forks by kind, in order of first appearance."""
    kinds: dict[tuple[str, bool], list[Fork]] = {}
    for fork in forks:
        kinds.setdefault((fork.kind, fork.call.raw), []).append(fork)
    return list(kinds.values())


def tree(report: Report) -> Table:
    """One row per call: a chain runs straight down, a branch moves to the right."""
    kinds = {fork.call.number: fork.kind.replace("_", " ") for fork in report.forks}
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", expand=False)
    for name in ("call", "role", "dialect"):
        table.add_column(name, no_wrap=True)
    for name in ("new", "prompt", "out"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended", overflow="fold")
    table.add_column("version", no_wrap=True)
    table.add_column("why it forks", overflow="fold", min_width=len("conversation"))
    for call, lead in islice(rows(report.session), MOST_CALLS):
        flags = [name for name, on in (("modified", call.modified), ("greedy", call.greedy)) if on]
        ended = call.finish or call.status if call.status == "complete" else call.status
        table.add_row(
            Text(f"{lead}{call.number}"),
            call.role,
            call.dialect.removeprefix("openai.").removeprefix("openai_"),
            f"{len(call.delta_ids):,}" if call.delivered else "–",
            f"{call.prompt_tokens:,}",
            f"{call.output_tokens:,}",
            Text(", ".join([ended, *flags]), style="" if call.status == "complete" else "red"),
            ",".join(map(str, call.versions)) or "–",
            Text(kinds.get(call.number, ""), style="yellow"),
        )
    return table


def summary(report: Report) -> Table:
    """The statistics as a table."""
    f = report.figures
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    others = [
        (f.lost, "lost"),
        (f.aborted, "aborted"),
        (f.failed, "failed"),
        (f.running, "running"),
        (f.upstream, "for another model"),
    ]
    rest = "".join(f", {n} {what}" for n, what in others if n)
    roles = ", ".join(f"{n} {role}" for role, n in (("main", f.main), ("subagent", f.subagent), ("side", f.side)) if n)
    table.add_row("calls", f"{f.delivered} delivered{rest}; by role: {roles or 'none'}")
    table.add_row(
        "trajectories", f"{f.trajectories}, of {f.forks} forks; {f.reprocessed_tokens:,} tokens are processed again"
    )
    merged = (
        "no call goes on with an earlier one"
        if f.merge_rate is None
        else (f"{f.merge_rate:.0%}: {f.extending} of {f.continuing} calls that go on extend an earlier one exactly")
    )
    table.add_row("merge rate", merged)
    table.add_row(
        "recorded", f"ids {_percent(f.ids)}, logprobs {_percent(f.logprobs)}, versions {_percent(f.versions)}"
    )
    table.add_row(
        "sampled",
        f"{f.sampled_tokens:,} tokens: {f.trainable_tokens:,} can be trained, {f.untrainable_tokens:,} cannot",
    )
    table.add_row(
        "other sampling",
        f"{f.modified} of a modified distribution, {f.greedy} greedy, "
        f"{f.replaced} asked for other values than they got",
    )
    table.add_row("retries", f"{f.retries} marked by the client, {f.repeated} with a body seen before")
    return table


def _show_alike(report: Report, forks: Sequence[Fork], console: Console) -> None:
    """Print the first forks of a kind and the number of others. For raw prompts print the number only."""
    first = forks[0]
    calls = some(f"call {fork.call.number}" for fork in forks)
    if first.call.raw and first.kind == ForkReason.NEW_CONVERSATION and len(forks) > 1:
        console.print(f"\n{len(forks):,} raw prompts (new conversation), each a conversation of its own: {calls}")
        return
    for fork in forks[:MOST_ALIKE]:
        console.print()
        _show_fork(report, fork, console)
    if len(forks) > MOST_ALIKE:
        more = f"{len(forks) - MOST_ALIKE:,} more of this kind ({first.kind.replace('_', ' ')})"
        console.print(f"\n{more}: {calls}; --json has them all")


def _show_fork(report: Report, fork: Fork, console: Console) -> None:
    advised, tokens, near = report.advice(fork), fork.tokens, neighbourhood(report, fork)
    recorded = fork.kind.replace("_", " ")
    unsure = "" if advised.certain else "probably: "
    head = Text.assemble(
        (f"call {fork.call.number}", "bold"), " forks ", (f"({recorded})", "yellow"), ": ", f"{unsure}{advised.cause}"
    )
    console.print(head)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    if tokens is not None and near is not None:
        other, ours = f"call {tokens.other.number}", f"call {fork.call.number}"
        of = fork.call.prompt_tokens
        grid.add_row(
            "first token",
            f"{tokens.position:,} of {of:,} are the same as in {other}; then "
            f"{_token(tokens.theirs)} there, {_token(tokens.ours)} here",
        )
        grid.add_row(other, _spelled(near.theirs))
        grid.add_row(ours, _spelled(near.ours))
    grid.add_row("cost", _cost(fork))
    grid.add_row("do", advised.todo)
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _cost(fork: Fork) -> str:
    if not fork.cost_tokens:
        return "none: nothing of it was processed before"
    share = fork.cost_tokens / max(1, len(fork.call.delta_ids))
    return f"{fork.cost_tokens:,} tokens are processed again ({share:.0%} of its new prompt tokens)"


def _spelled(parts: tuple[str, str, str]) -> Text:
    before, token, after = parts
    return Text.assemble(before, (f"⟦{token or 'end'}⟧", "bold reverse"), after)


def _token(token: int | None) -> str:
    return "the end" if token is None else f"id {token}"


def hanging(mark: str, line: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(mark, Text(line))
    return grid


def _rewards(session: Session) -> str:
    if not session.rewards:
        return "no reward"
    return "rewards " + ", ".join(f"{reward['name']} {reward['value']:g}" for reward in session.rewards[-5:])


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}" if share in (0, 1) else f"{share:.1%}"

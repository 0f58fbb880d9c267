"""`agentrl replay`: rebuilds past batches, verifies them byte for byte, and recomputes their credit."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.located import DatabaseUrl, Run, opened
from agentrl.visible import say

if TYPE_CHECKING:
    from rich.table import Table

    from agentrl.past_batches import Shift


def replay(
    steps: Annotated[str, typer.Option(help="Steps to replay: 5, 3..7, 3.. or ..7.")],
    run: Run = None,
    database_url: DatabaseUrl = None,
    rescore: Annotated[
        str | None, typer.Option(help="module:function that maps a session to its reward, {call id: reward} or None.")
    ] = None,
    discount: Annotated[float | None, typer.Option(help="Turn discount for the new credit.")] = None,
    estimator: Annotated[str | None, typer.Option(help="Algorithm for the new advantages: grpo, rloo, …")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the batches, one Parquet file per step.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the existing --out.")] = False,
) -> None:
    """Rebuild the batches of past steps and compare each, byte for byte, with what was trained. Reads the store only.

    With --rescore, --discount or --estimator also print the returns and advantages under the new credit. Exit status 1
    means that a batch differs from what was trained.
    """
    from agentrl import past_batches as again
    from agentrl.console import Console
    from agentrl.domain.selection import StepRange
    from agentrl.export.output import atomic_folder
    from agentrl.export.row_writers import ParquetWriter
    from agentrl.user_code import load_object

    wanted = StepRange.parse(steps)
    judge = load_object(rescore, "--rescore") if rescore else None
    credit = again.Credit(judge=judge, discount=discount, estimator=estimator)
    console = Console()
    shifts: list[tuple[int, Shift]] = []
    different = 0
    with opened(run, database_url) as store:
        database = store.database
        chosen = again.chosen_steps(database, store.run(), wanted)
        with ExitStack() as stack:
            folder = stack.enter_context(atomic_folder(out, force=force)) if out else None
            for step in chosen:
                checked = again.check(database, step)
                different += checked.fault is not None
                console.print(str(checked), soft_wrap=True)
                if checked.batch is not None and (folder or credit.changes):
                    credited = again.recredit(database, step, checked.batch, credit)
                    shifts.append((step.step, credited.shift()))
                    if folder:
                        with ParquetWriter(folder / f"step-{step.step:06d}.parquet", again.COLUMNS) as writer:
                            writer.write(again.records(step, credited))
    if credit.changes and shifts:
        console.print(_table(shifts))
    if different:
        say(f"{different} of {len(chosen)} batches differ from what was trained", err=True)
        raise typer.Exit(1)


def _table(shifts: list[tuple[int, Shift]]) -> Table:
    from rich.table import Table

    table = Table("step", "trajectories", "return", "new return", "|Δ advantage|", "signs changed", title="means")
    for step, shift in shifts:
        table.add_row(
            str(step),
            f"{shift.trajectories:,}",
            f"{shift.old_return:.4f}",
            f"{shift.new_return:.4f}",
            f"{shift.advantage:.4f}",
            str(shift.flipped),
        )
    return table

"""`agentrl task`: runs one process of a run on the host where a scheduler put it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UserError

TERMINATED_STATUS = 143


def task(
    folder: Annotated[Path, typer.Option(help="The run's folder, on storage that all hosts of the run share.")],
    part: Annotated[str, typer.Option(help="Name of the part, e.g. engine-0, proxy, trainer, rollout.")],
    rank: Annotated[
        int, typer.Option(min=0, envvar="AGENTRL_RANK", help="Number of the process in its part, from 0.")
    ] = 0,
) -> None:
    """Run one process of a run that `agentrl train` has placed with a scheduler, which calls this.

    Exit status 0: the process is done, was asked to stop, or its part was given up. After any other status the
    scheduler starts the task again.
    """
    import asyncio
    import logging
    import signal

    from agentrl.environment import DATABASE_URL
    from agentrl.location import run_name
    from agentrl.own_address import local_address
    from agentrl.placement.folder_proof import check_token
    from agentrl.placement.part_spec import PartSpec
    from agentrl.placement.run_secrets import read_secrets
    from agentrl.placement.task_runner import TaskRunner
    from agentrl.store import Database, part_ranks, runs
    from agentrl.store.db.sql_engines import host_of
    from agentrl.visible import log_to_stderr

    log_to_stderr("info")
    secrets = read_secrets(folder)
    database = Database(secrets[DATABASE_URL])
    run_id = database.query(runs.by_name, run_name(folder)).id
    row = database.query(part_ranks.find, run_id, part)
    if row is None:
        raise UserError(f"the run has no part {part!r}")
    spec = PartSpec.model_validate(row.spec)
    if rank >= spec.ranks:
        raise UserError(f"--rank {rank}: {part} has {spec.ranks} processes, numbered from 0")
    try:
        check_token(folder, spec.folder_token)
    except UserError as error:
        database.transact(part_ranks.give_up, run_id, part, str(error))
        logging.getLogger(__name__).error("%s", error)
        raise typer.Exit(0) from None
    runner = TaskRunner(
        database,
        run_id,
        spec,
        rank,
        run_dir=folder,
        secrets=secrets,
        address=local_address(host_of(database.url)),
    )

    async def main() -> int:
        work = asyncio.ensure_future(runner.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        await asyncio.wait([work])
        if work.cancelled():
            return TERMINATED_STATUS
        work.result()
        return 0

    try:
        raise typer.Exit(asyncio.run(main()))
    finally:
        database.close()

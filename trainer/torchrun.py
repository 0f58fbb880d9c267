"""Runs torchrun, and exits with the status of the rank that failed first, after printing that rank's error.

torchrun itself would exit with status 1.

    python -m agentrl.trainer.torchrun --nproc-per-node=2 … -m agentrl trainer …
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.run import main as run

from agentrl.errors import AgentRLError
from agentrl.visible import say


@contextmanager
def told() -> Iterator[None]:
    """In a rank: record an AgentRLError where torchrun finds it."""
    try:
        yield
    except AgentRLError as error:
        get_error_handler().record_exception(error)
        raise


def main() -> None:
    """Run the ranks."""
    try:
        run()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        recorded = failure.error_file_data["message"]
        if isinstance(recorded, dict):  # by `told`; the error's type comes first
            say(f"agentrl: {recorded['message'].partition(': ')[2]}", err=True)
        sys.exit(max(1, failure.exitcode))


if __name__ == "__main__":
    main()

"""torchrun that ends as the rank that failed first did, and says last what it said: torchrun's own status is 1.

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
    """In a rank: leave an error that we raise on purpose where torchrun finds it."""
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
        said = failure.error_file_data["message"]
        if isinstance(said, dict):  # of a rank's `told`: the error's type comes first
            say(f"agentrl: {said['message'].partition(': ')[2]}", err=True)
        sys.exit(max(1, failure.exitcode))


if __name__ == "__main__":
    main()

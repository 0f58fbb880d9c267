"""Run by ranks.py: a version that a rank cannot write. rank_failures.py OUT FOLDER WHO

WHO is a rank that is killed while it writes, or `full`: the disk of rank 1 is full, and then is not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from version_setup import writer

from agentrl.errors import StoreError
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.weights.share_writer import WholeFiles


def killed(world: World, folder: Path, out: Path, who: int) -> None:
    """The others get an error, and end without a word to the dead."""
    policy = load_sharded(Policy, folder, world.mesh)
    if world.rank == who:
        WholeFiles._finish = lambda self: os._exit(0)  # type: ignore[method-assign]
    try:
        writer(policy, folder, world).write(out / "v1-a", dict(policy.trainable()))
    except RuntimeError:
        (out / f"rank-{world.rank}-knows").touch()
        os._exit(0)
    raise AssertionError("the version is complete without a rank's share")


def full(world: World, folder: Path, out: Path) -> None:
    policy = load_sharded(Policy, folder, world.mesh)
    made = writer(policy, folder, world)
    if world.rank == 1:
        real, WholeFiles._put = WholeFiles._put, no_space  # type: ignore
    with pytest.raises(StoreError, match=r"v1-a cannot be written \(rank 1: \[Errno 28\] No space left on device\)"):
        made.write(out / "v1-a", dict(policy.trainable()))
    world.barrier()
    assert not list(out.iterdir())
    world.barrier()
    if world.rank == 1:
        WholeFiles._put = real  # type: ignore[method-assign]
    made.write(out / "v1-a", dict(policy.trainable()))


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def main(out: Path, folder: Path, who: str) -> None:
    with join_world("cpu", threads=1) as world:
        if who == "full":
            full(world, folder, out)
        else:
            killed(world, folder, out, int(who))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

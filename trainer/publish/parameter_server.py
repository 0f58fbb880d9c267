"""The process that one rank starts to send its files to the engines of its host's GPUs by checkpoint-engine.

    python -m agentrl.trainer.publish.parameter_server NAME FILE …   with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    all: register their files ─► gather what the others have ─► bind a socket per GPU
    rank 0: print {GPU: address of the socket} ─► read a line: the engines have answered ─► exit 0

What the package does (checkpoint-engine 0.4.2, checkpoint_engine/ps.py and worker.py): `update` broadcasts bucket after
bucket among the processes, each of which hands the buffer of its GPU to the engine's rank on that GPU, by a handle of
CUDA's memory over ZMQ. It waits without a limit for an engine that does not come, calls `req_func` in a thread with the
sockets of all GPUs, and refuses machines without an accelerator. `register_checkpoint` deletes files in /dev/shm unless
`use_inplace_pin_memory` is false. In a process of its own it can be killed, and its process group is not the trainer's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta

MOST_S = 3600.0
"""The process is killed by its parent long before."""


def serve(name: str, files: Sequence[str]) -> None:
    """Send this process's files to the engines of all GPUs. Collective among the processes."""
    from checkpoint_engine.ps import ParameterServer

    server = ParameterServer(auto_pg=True)
    server.register_checkpoint(name, files=list(files), use_inplace_pin_memory=False)
    server.gather_metas(name)
    server.update(name, announce, timeout=timedelta(seconds=MOST_S))
    server.unregister_checkpoint(name)


def announce(sockets: list[tuple[str, str]]) -> None:
    """Print where the engines find this update, and wait until they have answered. Other ranks' parents ignore it."""
    sys.stdout.write(json.dumps(dict(sockets)) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])

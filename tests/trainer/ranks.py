"""Runs a script of the tests on several ranks.

The ranks are forked from one process (forks.py), and meet at a store that the test's process keeps, as torchrun's do.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

from forks import FORKS
from torch.distributed import TCPStore

HERE = Path(__file__).parent
LIMIT_S = 500.0


def run_ranks(script: str, ranks: int, *arguments: object) -> None:
    """Run `script`, a file of this folder, on so many ranks; all of them must end with status 0."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = dict(os.environ) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            asked = (HERE / script, list(map(str, arguments)), meet | place, log)
            processes.append(FORKS.Process(target=_run, args=asked, daemon=True))
        for process in processes:
            process.start()
        try:
            running = {process.sentinel: process for process in processes}
            while running:
                ended = wait(list(running), LIMIT_S)
                assert ended, f"{script} took longer than {LIMIT_S:g} s"
                for sentinel in ended:
                    process = running.pop(sentinel)
                    process.join()
                    assert process.exitcode == 0, "\n".join(log.read_text() for log in logs if log.exists())
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run(script: Path, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """What a rank does."""
    os.environ.clear()
    os.environ.update(environment)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")

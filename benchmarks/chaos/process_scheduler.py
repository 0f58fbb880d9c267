"""A scheduler whose hosts are on this machine, and the supervisor of a run that it places.

    python process_scheduler.py CONFIG [OVERRIDE…]

It does what schedulers do, and no more: it starts task runners, starts those again that end with a status other than 0,
and keeps them when the supervisor dies. AGENTRL_NAMESPACES names network namespaces (`a,b`) that serve as hosts, with
addresses and shared memory of their own; without it all runners are on this host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from agentrl.configs.config_files import load_config
from agentrl.console import Console
from agentrl.launch import placed_run
from agentrl.placement.part_spec import PartSpec
from agentrl.placement.scheduler import RunnerState, runner_command

NAMESPACES = "AGENTRL_NAMESPACES"
OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
AGAIN = 'while true; do "$@" && exit 0; sleep 0.5; done'


class ProcessScheduler:
    """Keeps a process group for each rank; `runners/PART-RANK` holds its id."""

    moves_supervisor = False

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.resolve()
        self._folder = self._run_dir / "runners"

    def check(self, parts: Sequence[PartSpec]) -> None:
        """Everything fits."""

    def apply(self, parts: Sequence[PartSpec]) -> None:
        """Start the runners that are missing."""
        self._folder.mkdir(exist_ok=True)
        for part in parts:
            for rank in range(part.ranks):
                record = self._folder / f"{part.name}-{rank}"
                if not record.exists() or not psutil.pid_exists(int(record.read_text())):
                    record.write_text(str(self._start(part.name, rank)))

    def _start(self, part: str, rank: int) -> int:
        with (self._run_dir / "logs" / f"runner-{part}-{rank}.log").open("ab") as log:
            argv = [*_on_host(part, rank), "sh", "-c", AGAIN, "sh", *runner_command(self._run_dir, part, rank)]
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True).pid

    def states(self) -> list[RunnerState]:
        """All are placed."""
        return []

    def remove(self, *, kill: bool = False) -> None:
        """Forget the runners, which have ended; with `kill`, end them."""
        for record in self._folder.glob("*"):
            if kill and psutil.pid_exists(int(record.read_text())):
                os.killpg(int(record.read_text()), signal.SIGKILL)
            record.unlink()


def _on_host(part: str, rank: int) -> list[str]:
    """The words before a command that run it on its host: the ranks of a part, and single parts, take turns."""
    names = [name for name in os.environ.get(NAMESPACES, "").split(",") if name]
    if not names:
        return []
    turn = rank + (int(part.rpartition("-")[2]) if part[-1].isdecimal() else 0)
    return ["ip", "netns", "exec", names[turn % len(names)], "unshare", "-m", "sh", "-c", OWN_MEMORY, "sh"]


def main() -> None:
    """Supervise the run."""
    config = load_config(Path(sys.argv[1]), sys.argv[2:])
    (config.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    placed_run.train(config, Console(), ProcessScheduler(config.run_dir))


if __name__ == "__main__":
    main()

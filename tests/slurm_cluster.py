"""A Slurm cluster on this machine: a real slurmctld and one real slurmd for each host, which has GPUs in name only.

It needs Slurm's daemons (Debian: `apt-get install slurmctld slurmd`) and root, and no munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agentrl.engine.server_process import free_port

NVIDIA_MAJOR = 195
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
SlurmdTimeout=10
KillWait=10
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN"
)


def missing() -> str | None:
    """Why there can be no cluster here."""
    if not (shutil.which("slurmctld") and shutil.which("slurmd")):
        return "Slurm's daemons are not installed"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@dataclass
class Cluster:
    """A controller and its hosts."""

    home: Path
    names: Sequence[str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a host."""
        self.daemons[name] = self._daemon("slurmd", "-D", "-N", name)

    def lose(self, name: str) -> None:
        """Kill everything on a host at once."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        there = [process for process in psutil.process_iter() if _is_on(process, name, self.home)]
        for process in there:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.parent()
                if parent is not None and parent.name().startswith("slurmstepd"):
                    parent.kill()
                process.kill()

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands."""
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    def until(self, *command: str, answer: str) -> None:
        """Wait until a command prints what is expected."""
        limit = time.monotonic() + 300
        while (said := self.ask(*command).strip()) != answer:
            assert time.monotonic() < limit, (command, said, answer)
            time.sleep(0.2)

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(self) -> None:
        """Start the controller and all hosts, and wait until they are idle."""
        self.daemons["slurmctld"] = self._daemon("slurmctld", "-D", "-c")
        for name in self.names:
            self.start(name)
        self.until("sinfo", "--noheader", "--format=%D %T", answer=f"{len(self.names)} idle")

    def end(self) -> None:
        """End all jobs and then the daemons."""
        self.ask("scancel", "--user=root")
        with contextlib.suppress(AssertionError):
            self.until("squeue", "--noheader", answer="")
        for process in self.daemons.values():
            process.terminate()
        for process in self.daemons.values():
            process.wait(60)


def _is_on(process: psutil.Process, name: str, home: Path) -> bool:
    """Whether a process is of a step on a host of this cluster."""
    try:
        env = process.environ()
    except psutil.Error:
        return False
    return env.get("SLURMD_NODENAME") == name and env.get("SLURM_CONF") == str(home / "slurm.conf")


@contextlib.contextmanager
def cluster(home: Path, hosts: int, gpus: int) -> Iterator[Cluster]:
    """A cluster whose commands work in this process's environment while the block runs."""
    names = [f"n{number}" for number in range(hosts)]
    host = socket.gethostname()
    (home / "state").mkdir(parents=True)
    devices = [home / f"nvidia{number}" for number in range(gpus)]
    for number, device in enumerate(devices):
        os.mknod(device, 0o20600, os.makedev(NVIDIA_MAJOR, number))
    nodes = [NODE.format(name=name, host=host, port=free_port(), gpus=gpus) for name in names]
    text = CONFIG.format(home=home, host=host, controller_port=free_port(), nodes="\n".join(nodes))
    (home / "slurm.conf").write_text(text)
    (home / "gres.conf").write_text(f"NodeName=n[0-{hosts - 1}] Name=gpu File={home}/nvidia[0-{gpus - 1}]\n")
    (home / "cgroup.conf").write_text("CgroupAutomount=no\n")
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(home / "slurm.conf")
    found = Cluster(home, names)
    try:
        found.run()
        yield found
    finally:
        found.end()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before

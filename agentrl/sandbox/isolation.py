"""How a command is isolated: the words before it, by the tools that this machine has.

bubblewrap   a new root with system folders to read, and an empty folder to write
landlock     namespaces of util-linux's unshare for network and processes, Landlock for files

Both give the command no network, no processes of others, and no capability. Under root, each command also has a user id
of its own, so that its number of processes is bounded.
"""

from __future__ import annotations

import functools
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from agentrl.errors import UserError
from agentrl.sandbox import landlocked
from agentrl.sandbox.sandbox_files import open_files

Isolation = Literal["bubblewrap", "landlock"]
ISOLATIONS: tuple[Isolation, ...] = ("bubblewrap", "landlock")
WORK = "/run/work"
"""The command's folder, as it sees it: empty but for its files, in memory."""
BASE_PYTHON = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime", "/etc/passwd", "/etc/group")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
UIDS = (1 << 24, 1 << 30)
"""Range of the user ids of commands that root starts; others rarely use it."""
PROBE_TIMEOUT_S = 20.0
UNPACK, ENTER = 'tar -xf "$1" -C "$2"', 'cd "$2" && shift 2 && { "$@"; exit $?; }'
"""Shell commands that unpack the files into the folder, and run the rest of the words there. The shell stays, since the
kernel ignores most signals to the first process of a namespace.
"""
LAUNCHER = Path(landlocked.__file__).read_text()
"""Given as text: the file itself may be hidden."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": WORK,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The command's whole environment."""


def confined(
    isolation: Isolation,
    command: Sequence[str],
    limits: Sequence[str],
    *,
    files: str,
    disk_bytes: int,
    readable: Sequence[str],
) -> list[str]:
    """The words that run `command` in isolation, in a folder with the content of `files`, a tar file; `limits`
    are options of prlimit.
    """
    root = os.geteuid() == 0
    uid = str(random.randrange(*UIDS))
    drop = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"] if root else ["setpriv"]
    drop += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if root or isolation == "landlock" else []
    bounded = [*(drop if len(drop) > 1 else []), "prlimit", *limits, *command]
    ours = [os.path.realpath(path) for path in dict.fromkeys((sys.base_prefix, *readable))]
    ours = [
        path for path in ours if not path.startswith(tuple(f"{system}/" for system in SYSTEM)) and path not in SYSTEM
    ]
    if isolation == "landlock":
        namespaces = ["--net", "--pid", "--ipc", "--uts", "--mount", "--fork", "--kill-child", "--mount-proc"]
        seen = [*SYSTEM, *ours, *ETC, "/proc", "--", WORK, *DEVICES, "--"]
        script = " && ".join([*_mounts(ours, disk_bytes), ENTER])
        inside = ["sh", "-c", script, "sh", files, WORK, BASE_PYTHON, "-IS", "-c", LAUNCHER, *seen, *bounded]
        return ["unshare", *([] if root else ["--user", "--map-root-user"]), *namespaces, *inside]
    words = ["bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", *([] if root else ["--unshare-user"])]
    for parent in dict.fromkeys(str(parent) for path in ours for parent in reversed(Path(path).parents[:-1])):
        words += ["--perms", "0755", "--dir", parent]
    words += ["--perms", "0755", "--dir", "/run"]
    for path in (*SYSTEM, *ours, *ETC):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    words += ["--dev", "/dev", "--proc", "/proc"]
    words += [
        "--perms",
        "0777",
        "--size",
        str(disk_bytes),
        "--tmpfs",
        WORK,
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/",
    ]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    return [*words, "sh", "-c", f"{UNPACK} && {ENTER}", "sh", files, WORK, *bounded]


def _mounts(kept: Sequence[str], disk_bytes: int) -> Iterator[str]:
    """Shell commands that mount and fill the folder of the command, and hide /run, /tmp, and the top folders of `kept`.
    The sockets of services are usually in them, and Landlock does not restrict connections to sockets.
    """
    yield f"mount -t tmpfs -o size={disk_bytes},mode=0755 none /run && mkdir -m 777 {WORK} && {UNPACK}"
    for number, path in enumerate(kept):
        yield f"mkdir -p /run/kept/{number} && mount --bind {shlex.quote(path)} /run/kept/{number}"
    for top in dict.fromkeys(["/tmp", *(f"/{Path(path).parts[1]}" for path in kept)]):
        yield f"mount -t tmpfs -o size=1m,mode=0755 none {shlex.quote(top)}"
    for number, path in enumerate(kept):
        yield f"mkdir -p {shlex.quote(path)} && mount --bind /run/kept/{number} {shlex.quote(path)}"


@functools.cache
def works(isolation: Isolation) -> str | None:
    """Try an isolation; returns why it does not work, or None."""
    tools = ["bwrap"] if isolation == "bubblewrap" else ["unshare", "mount"]
    missing = [tool for tool in (*tools, "tar", "setpriv", "prlimit") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed"
    try:
        with open_files({}) as (files, path):
            words = confined(
                isolation, [BASE_PYTHON, "-IS", "-c", ""], ["--core=0"], files=path, disk_bytes=2**20, readable=()
            )
            done = subprocess.run(
                words, env=ENVIRONMENT, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, pass_fds=[files]
            )
    except subprocess.TimeoutExpired:
        return f"{words[0]} did not end"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return None if done.returncode == 0 else lines[-1][:200]


def choose(wanted: Isolation | None = None) -> Isolation:
    """The wanted isolation, else the first that works here. Raises UserError."""
    reasons = {one: works(one) for one in (ISOLATIONS if wanted is None else (wanted,))}
    for one, reason in reasons.items():
        if reason is None:
            return one
    said = "; ".join(f"{one}: {reason}" for one, reason in reasons.items())
    raise UserError(f"code cannot be isolated on this machine ({said}): install bubblewrap, or allow user namespaces")

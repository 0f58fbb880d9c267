"""Restricts this process to some files and runs a command: `python landlocked.py READABLE… -- WRITABLE… -- COMMAND…`.

Linux's Landlock makes everything else unreadable and unwritable, also for what the command starts, and forbids changes
of mounts. Only the standard library is used, and nothing of ours, because this runs inside the sandbox.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, the same on all processors
PATH_BENEATH, NO_NEW_PRIVS = 1, 38
RIGHTS_BY_VERSION = (0, 13, 14, 15, 15, 16)
"""How many file rights each version of Landlock knows: 13 at first, then renames between folders, truncate, ioctl."""
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
FILE_ONLY = EXECUTE | 1 << 1 | READ_FILE | 1 << 14 | 1 << 15


def main(arguments: list[str]) -> None:
    """Restrict this process, then run the command. Exits with 126 where Landlock is missing."""
    first = arguments.index("--")
    second = arguments.index("--", first + 1)
    readable, writable, command = arguments[:first], arguments[first + 1 : second], arguments[second + 1 :]
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        sys.exit(126)
    everything = (1 << RIGHTS_BY_VERSION[min(version, len(RIGHTS_BY_VERSION) - 1)]) - 1
    attributes = struct.pack("=Q", everything)
    ruleset = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        sys.exit(126)
    for paths, rights in ((readable, EXECUTE | READ_FILE | READ_DIR), (writable, everything)):
        for path in paths:
            _allow(libc, ruleset, path, rights & everything)
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(RESTRICT_SELF, ruleset, 0) != 0:
        sys.exit(126)
    os.close(ruleset)
    os.execvp(command[0], command)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    """Allow `rights` on a file, or on all files in a folder. A path that does not exist is left out."""
    try:
        opened = os.open(path, os.O_PATH)
    except OSError:
        return
    rights = rights if os.path.isdir(path) else rights & FILE_ONLY
    rule = struct.pack("=Qi", rights, opened)
    failed = libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
    os.close(opened)
    if failed:
        sys.exit(126)


if __name__ == "__main__":
    main(sys.argv[1:])

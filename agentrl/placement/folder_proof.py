"""Proves that a host sees the run's folder, and not another folder at the same path.

    supervisor    adds a new token to the folder's TOKENS file, then writes it to the parts' specs in the database
    task runner   starts its command only if the token of its part's spec is in the file that it sees

A host whose storage is not mounted sees no file. A folder that was left on the host, or copied there, lacks the token.
Older tokens stay in the file, for a runner that starts between the supervisor's two writes.
"""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

from agentrl.errors import UserError
from agentrl.files import atomic_file

TOKENS = ".tokens"
KEPT = 100
SEEN_AFTER_S = 60.0
"""How long a runner waits for the token: hosts cache the entries of a network folder for up to a minute."""
POLL_S = 0.5


def add_token(run_dir: Path) -> str:
    """Add a new token to the folder; returns it. Raises OSError."""
    token = secrets.token_hex(16)
    with atomic_file(run_dir / TOKENS) as draft:
        draft.write_text("\n".join([*_tokens(run_dir), token][-KEPT:]) + "\n")
    return token


def check_token(run_dir: Path, token: str | None) -> None:
    """Raise UserError when the folder does not have the token in time. A part without a token has no check."""
    until = time.monotonic() + SEEN_AFTER_S
    while token is not None and (fault := _fault(run_dir, token)) is not None:
        if time.monotonic() >= until:
            raise UserError(
                f"host {socket.gethostname()} {fault}: put runs_dir on storage that all hosts of the run share"
            )
        time.sleep(POLL_S)


def _fault(run_dir: Path, token: str) -> str | None:
    """The problem with this host's folder; None if it has the token."""
    try:
        found = _tokens(run_dir)
    except OSError as error:
        return f"cannot read {(run_dir / TOKENS).absolute()} ({error.strerror})"
    return None if token in found else f"has another folder at {run_dir.absolute()} than the run's supervisor"


def _tokens(run_dir: Path) -> list[str]:
    try:
        return (run_dir / TOKENS).read_text(errors="replace").split()
    except FileNotFoundError:
        return []

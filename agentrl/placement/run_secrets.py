"""The secrets of a run on many hosts, also those of its object storage: one file in the run's folder that its owner
alone can read.

Schedulers keep records of command lines and environments, so a task runner gets the folder and reads the file. The
folder is on storage that all hosts share; a host that does not see the file does not see the run.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from agentrl.environment import DATABASE_URL, SECRETS, STORAGE, with_storage
from agentrl.errors import UserError
from agentrl.files import atomic_file

SECRETS_FILE = ".secrets"


def write_secrets(run_dir: Path, secrets: Mapping[str, str]) -> None:
    """Write the secrets, by the names of their variables, with mode 0600."""
    with atomic_file(run_dir / SECRETS_FILE) as draft:
        draft.write_text(json.dumps(dict(secrets)))


def read_secrets(run_dir: Path) -> dict[str, str]:
    """The secrets of a run. Raises UserError when this host does not see the run's folder or the file is damaged."""
    path = run_dir / SECRETS_FILE
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"host {socket.gethostname()} does not see {path}: put runs_dir on storage that all hosts of the run share"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get(DATABASE_URL), str):
        raise UserError(f"{path} holds no {DATABASE_URL}: remove it, and start the run again")
    return {name: value for name, value in found.items() if name in SECRETS | STORAGE and isinstance(value, str)}


def adopt_storage(run_dir: Path) -> None:
    """Give this process the run's access to the object storage, where its own environment has none."""
    if (run_dir / SECRETS_FILE).exists():
        os.environ.update(with_storage(os.environ, read_secrets(run_dir)))

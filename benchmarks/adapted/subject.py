"""What benchmarks/environments.py needs to know of an environment."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Episode = Mapping[str, Any]
"""`task`: its task; `answers`: the texts that the model wrote in the main session; `children`: the same of each
sub-agent's session, with its `reward` and `metadata`; `folder`: the run's folder.
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An environment with a policy that answers at random.

    `config` is the part of the run's configuration that names it. `says` writes an answer to a prompt. `rewards`
    computes what the environment itself gives an episode: one reward of the session, and one of each sub-agent.
    """

    config: Callable[[Path], dict[str, Any]]
    says: Callable[[str, random.Random], str]
    rewards: Callable[[Episode], list[float]]
    files: Mapping[str, str] = field(default_factory=dict)
    service: Callable[[Path], AbstractContextManager[Any]] = lambda folder: nullcontext()

"""The machines of a run, and the GPUs that it may use on each."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its name, and the GPUs that the run may use there, as `CUDA_VISIBLE_DEVICES` names them."""

    name: str
    gpus: tuple[str, ...]


def this_host(env: Mapping[str, str] = os.environ) -> Host:
    """This machine, with the GPUs that torch finds."""
    import torch

    return Host(socket.gethostname(), visible_gpus(torch.cuda.device_count(), env))


def visible_gpus(count: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the first `count` GPUs: as `CUDA_VISIBLE_DEVICES` lists them, else their numbers."""
    listed = [name.strip() for name in env.get(VISIBLE_GPUS, "").split(",") if name.strip()]
    return tuple(listed[:count]) if listed else tuple(str(number) for number in range(count))


def like_hosts(count: int, gpus: int) -> tuple[Host, ...]:
    """`count` machines of `gpus` GPUs each, for a plan without the machines."""
    return tuple(Host(f"host-{index}", tuple(str(number) for number in range(gpus))) for index in range(count))

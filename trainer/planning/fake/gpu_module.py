"""`torch.gpu`: what torch asks of a device's module. The fake device has one stream, in which everything is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class OnlyStream:
    """The stream of the fake device."""

    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        """Everything is over already."""

    def wait_stream(self, stream: Any) -> None:
        """Everything is over already."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or PastEvent()

    def synchronize(self) -> None:
        """Everything is over already."""


class PastEvent(torch.Event):
    """An event that has happened. torch's own streams take it too."""

    def __new__(cls, *_: Any, **__: Any) -> PastEvent:
        """An event of the fake device, whatever is asked for."""
        return super().__new__(cls, device=torch.device("gpu", 0))

    def record(self, stream: Any = None) -> None:
        """It has happened already."""

    def wait(self, stream: Any = None) -> None:
        """It has happened already."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def synchronize(self) -> None:
        """It has happened already."""


@contextmanager
def _stream(_: Any) -> Iterator[None]:
    yield


def gpu_module() -> Any:
    """The module of the fake device."""
    only, state = OnlyStream(), torch.zeros(16, dtype=torch.uint8)
    return SimpleNamespace(
        Stream=OnlyStream,
        Event=PastEvent,
        current_device=lambda: 0,
        current_stream=lambda device=None: only,
        default_stream=lambda device=None: only,
        device=lambda index: _stream(index),
        device_count=lambda: 1,
        empty_cache=lambda: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_device_name=lambda device=None: "fake accelerator",
        get_rng_state=lambda device=None: state.clone(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed_all=lambda seed: None,
        manual_seed=lambda seed: None,
        set_device=lambda device: None,
        set_rng_state=lambda state, device=None: None,
        stream=_stream,
        synchronize=lambda device=None: None,
        _is_in_bad_fork=lambda: False,
    )

"""Stages one version in a scheduler's process: a thread loads a folder into the shadow while the scheduler decodes.

    NONE ──start──► STAGING ──► READY ──exchange──► NONE
                        ├─ failed ──► FAILED
                        └─ discard ──► NONE, as soon as the thread notices

The thread yields to decoding: one thread of torch, a lower priority, and a rest after each tensor. Imported inside
SGLang's scheduler only; imports torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from agentrl.engine.control.preparation import MOST_ERROR, PreparationState
from agentrl.engine.prepared.shadow_memory import make_shadow, own_stream, release_cached
from agentrl.engine.prepared.shadow_model import Pace, Shadow, fingerprint

REST = 0.5
"""Rest on a CPU, as a share of the time of the work before it."""
NICE = 5
"""By how much the thread's priority is lower than the scheduler's."""
DAMAGED = 70
"""Exit status of a scheduler whose weights in use were changed by a staging."""


class Discarded(Exception):
    """The staging is not wanted any more."""


@dataclass(slots=True)
class Staged:
    """One staging. `digests` are those of the staged weights, if they were ordered."""

    name: str
    folder: Path
    with_digests: bool
    state: PreparationState = PreparationState.STAGING
    error: str | None = None
    seconds: float = 0.0
    digests: dict[str, Any] | None = None
    discarded: threading.Event = field(default_factory=threading.Event)


class Staging:
    """The shadow of a model, and what is staged in it.

    `load` loads tensors into a model on a device as SGLang's loader does; `digest` is its weight checker; `device` is
    the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        load: Callable[[nn.Module, Iterator[tuple[str, Tensor]], torch.device], None],
        digest: Callable[[nn.Module], dict[str, Any]],
        device: torch.device,
    ) -> None:
        self._model = model
        self._load = load
        self._digest = digest
        self._device = device
        self._shadow: Shadow[nn.Module] | None = None
        self._checked = False  # that loading into the shadow leaves the model as it is
        self._staged: Staged | None = None
        self._thread: threading.Thread | None = None

    @property
    def staged(self) -> Staged | None:
        """The version that is staged, or is being staged; None without one."""
        return self._staged

    @property
    def is_busy(self) -> bool:
        """Whether the thread runs, also for a staging that was discarded."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, staged: Staged) -> None:
        """Begin to stage; nothing else may be being staged."""
        assert not self.is_busy
        self._staged = staged
        threads, limited = torch.get_num_threads(), threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run, staged, limited), name="agentrl-staging", daemon=True
        )
        self._thread.start()
        limited.wait()
        torch.set_num_threads(threads)  # the thread's limit is its own, but torch would hand it to new threads

    def discard(self, *, free: bool = False) -> None:
        """Forget what is staged; with `free` also the memory of the shadow, once the thread has ended."""
        if self._staged is not None:
            self._staged.discarded.set()
            self._staged = None
        if free and self._thread is not None:
            self._thread.join()
        if free:
            self._shadow = None
            release_cached(self._device)

    def exchange(self) -> None:
        """Make the staged weights those in use. The state must be READY."""
        assert self._shadow is not None
        self._staged = None
        self._shadow.exchange()

    def _run(self, staged: Staged, limited: threading.Event) -> None:
        torch.set_num_threads(1)
        limited.set()
        with contextlib.suppress(OSError):  # a container may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        began = time.monotonic()
        try:
            with own_stream(self._device):
                self._stage(staged, pace_of(staged.discarded, REST if self._device.type == "cpu" else 0.0))
            staged.seconds = time.monotonic() - began
            staged.state = PreparationState.READY
        except Discarded:
            pass
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            staged.error = f"{type(error).__name__}: {error}"[:MOST_ERROR]
        finally:
            if staged.state is PreparationState.STAGING:
                staged.error = staged.error or "the staging ended early"
                staged.state = PreparationState.FAILED

    def _stage(self, staged: Staged, pace: Pace) -> None:
        before = None if self._checked else fingerprint(self._model, pace)
        if self._shadow is None:
            self._shadow = make_shadow(self._model, self._device)
        self._shadow.refresh(pace)
        with torch.no_grad():
            self._load(self._shadow.model, tensors_of(staged.folder, pace), self._shadow.device)
        self._shadow.check(pace)
        if staged.with_digests:
            staged.digests = self._digest(self._shadow.model)
        if before is not None:
            if fingerprint(self._model, pace) != before:
                os._exit(DAMAGED)  # what it serves is of no version: no further token may be sampled
            self._checked = True


def tensors_of(folder: Path, pace: Pace) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder's safetensors files, by file and name.

    Raises FileNotFoundError when there is none, ValueError for a damaged file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no safetensors files")
    for path in files:
        try:
            opened: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        with opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                yield name, opened.get_tensor(name)
                pace()


def pace_of(discarded: threading.Event, rest: float) -> Pace:
    """A pace that rests for a share of the time since its last call, and raises Discarded."""
    last = time.monotonic()

    def pace() -> None:
        nonlocal last
        discarded.wait(rest * (time.monotonic() - last))
        if discarded.is_set():
            raise Discarded
        last = time.monotonic()

    return pace

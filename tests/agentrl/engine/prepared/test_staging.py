"""The thread that stages a folder: its states, its failures, and its end when it is discarded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.engine.control.preparation import PreparationState
from agentrl.engine.prepared import staging as staging_module
from agentrl.engine.prepared.staging import Discarded, Staged, Staging, pace_of, tensors_of


def digest(model: Any) -> dict[str, Any]:
    return {"sum": float(model.weight.sum())}


class Script:
    """A model of one layer, and a load that waits in the middle until a test lets it go on."""

    def __init__(self) -> None:
        self.model: Any = nn.Linear(3, 2, bias=False)
        self.go_on = threading.Event()
        self.go_on.set()
        self.loading = threading.Event()
        self.error: Exception | None = None
        self.writes_to: Any = None
        self.threads = 0

    def load(self, model: Any, tensors: Iterator[tuple[str, Tensor]], device: torch.device) -> None:
        assert device.type == "cpu"
        self.threads = torch.get_num_threads()
        for _, tensor in tensors:
            (self.writes_to or model).weight.data.copy_(tensor)
            self.loading.set()
            self.go_on.wait(10)
            if self.error is not None:
                raise self.error

    def staging(self) -> Staging:
        return Staging(self.model, self.load, digest, torch.device("cpu"))


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"weight": torch.full((2, 3), 7.0), "x": torch.full((2, 3), 7.0)}, tmp_path / "model.safetensors")
    return tmp_path


def ended(staging: Staging) -> None:
    assert staging._thread is not None
    staging._thread.join(10)
    assert not staging.is_busy


def test_a_folder_is_staged_and_exchanged(script: Script, folder: Path) -> None:
    staging, before = script.staging(), script.model.weight.tolist()
    staged, threads = Staged("v1-a", folder, with_digests=True), torch.get_num_threads()
    staging.start(staged)
    assert torch.get_num_threads() == threads
    ended(staging)
    assert (staged.state, staged.error, staged.digests) == (PreparationState.READY, None, {"sum": 42.0})
    assert script.threads == 1
    assert script.model.weight.tolist() == before
    staging.exchange()
    assert script.model.weight.tolist() == [[7.0] * 3] * 2
    assert staging.staged is None


@pytest.mark.parametrize("error", [RuntimeError("shape"), KeyError("name"), AssertionError()], ids=["a", "b", "c"])
def test_a_failure_is_reported_and_the_next_staging_works(script: Script, folder: Path, error: Exception) -> None:
    staging, before = script.staging(), script.model.weight.tolist()
    script.error = error
    staged = Staged("v1-a", folder, with_digests=False)
    staging.start(staged)
    ended(staging)
    assert staged.state is PreparationState.FAILED
    assert staged.error is not None
    assert type(error).__name__ in staged.error
    assert script.model.weight.tolist() == before
    script.error = None
    again = Staged("v1-a", folder, with_digests=False)
    staging.start(again)
    ended(staging)
    assert again.state is PreparationState.READY


@pytest.mark.parametrize("content", [None, b"", b"x" * 100], ids=["absent", "empty", "garbage"])
def test_a_folder_without_tensors_fails(script: Script, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    staging, staged = script.staging(), Staged("v1-a", tmp_path, with_digests=False)
    staging.start(staged)
    ended(staging)
    assert staged.state is PreparationState.FAILED
    assert staged.error


def test_a_discarded_staging_ends_at_the_next_tensor(script: Script, folder: Path) -> None:
    staging = script.staging()
    script.go_on.clear()
    staged = Staged("v1-a", folder, with_digests=False)
    staging.start(staged)
    script.loading.wait(10)
    staging.discard()
    assert staging.staged is None
    assert staging.is_busy
    script.go_on.set()
    ended(staging)
    assert staged.state is PreparationState.FAILED


def test_the_memory_of_the_shadow_can_be_freed(script: Script, folder: Path) -> None:
    staging = script.staging()
    staging.start(Staged("v1-a", folder, with_digests=False))
    staging.discard(free=True)
    assert not staging.is_busy
    assert staging._shadow is None


def test_a_process_whose_weights_in_use_were_changed_ends(
    script: Script, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token may be sampled from weights of no version."""
    statuses: list[int] = []
    monkeypatch.setattr(staging_module.os, "_exit", statuses.append)
    script.writes_to = script.model
    staging = script.staging()
    staging.start(Staged("v1-a", folder, with_digests=False))
    ended(staging)
    assert statuses == [staging_module.DAMAGED]


def test_a_pace_raises_when_the_staging_is_discarded(folder: Path) -> None:
    discarded = threading.Event()
    pace = pace_of(discarded, 0.5)
    assert [name for name, _ in tensors_of(folder, pace)] == ["weight", "x"]
    discarded.set()
    with pytest.raises(Discarded):
        list(tensors_of(folder, pace))

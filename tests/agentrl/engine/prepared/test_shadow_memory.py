"""Where a shadow is: beside a model on a CPU; on a GPU as `publish.shadow` says. The GPU's memory is scripted here;
test_shadow_on_gpu.py runs on one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from agentrl.engine.control.preparation import SHADOW_MEMORY
from agentrl.engine.prepared import shadow_memory
from agentrl.engine.prepared.shadow_memory import make_shadow, own_stream, release_cached

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NEEDED = 4 * 8 * 8
"""Bytes of the model's weights."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where shadows were made; those in the GPU's memory fail when it holds less than the weights."""
    places: list[str] = []

    def shadow(_: nn.Module, device: torch.device = CPU, *, pinned: bool = False) -> str:
        if device == GPU and torch.cuda.mem_get_info(GPU)[0] < NEEDED:
            raise torch.OutOfMemoryError("CUDA out of memory")
        places.append(f"{device.type}{' pinned' if pinned else ''}")
        return places[-1]

    monkeypatch.setattr(shadow_memory, "Shadow", shadow)
    return places


def test_on_a_cpu_it_is_in_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHADOW_MEMORY, "gpu")
    live = nn.Linear(8, 8, bias=False)
    shadow: Any = make_shadow(live, CPU)
    assert shadow.device == shadow.model.weight.device == CPU
    assert not shadow.model.weight.is_pinned()
    with own_stream(CPU):
        shadow.refresh(lambda: None)
    release_cached(CPU)
    assert torch.equal(shadow.model.weight, live.weight)


@pytest.mark.parametrize(
    ("setting", "free", "place"),
    [
        (None, 2 * NEEDED, "cuda"),
        ("auto", 2 * NEEDED, "cuda"),
        ("auto", 2 * NEEDED - 1, "cpu pinned"),
        ("gpu", NEEDED, "cuda"),
        ("host", 100 * NEEDED, "cpu pinned"),
    ],
)
def test_on_a_gpu_it_is_where_the_setting_says(
    setting: str | None, free: int, place: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 << 30))
    monkeypatch.delenv(SHADOW_MEMORY, raising=False)
    if setting is not None:
        monkeypatch.setenv(SHADOW_MEMORY, setting)
    make_shadow(nn.Linear(8, 8, bias=False), GPU)
    assert made == [place]


def test_memory_that_is_gone_meanwhile_is_no_error_unless_it_must_be_there(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([2 * NEEDED, NEEDED - 1, 2 * NEEDED, NEEDED - 1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(seen), 80 << 30))
    monkeypatch.setenv(SHADOW_MEMORY, "auto")
    make_shadow(nn.Linear(8, 8, bias=False), GPU)
    assert made == ["cpu pinned"]
    monkeypatch.setenv(SHADOW_MEMORY, "gpu")
    with pytest.raises(RuntimeError, match=r"publish\.shadow: gpu, but .* lower engine\.memory_fraction"):
        make_shadow(nn.Linear(8, 8, bias=False), GPU)

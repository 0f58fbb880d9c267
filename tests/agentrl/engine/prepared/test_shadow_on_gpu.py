"""A shadow of a model whose forward pass is a CUDA graph: `make gpu` runs these tests. Elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from agentrl.engine.control.preparation import SHADOW_MEMORY
from agentrl.engine.prepared.shadow_memory import FREE_SHARE, make_shadow
from agentrl.engine.prepared.shadow_model import fingerprint

pytestmark = pytest.mark.gpu
ROWS, WIDTH, LAYERS = 8, 1024, 8


def no_rest() -> None:
    """A pace without rests."""


class Tied(nn.Module):
    """Layers, and a head that is the embedding's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 5000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.nn.functional.silu(layer(hidden)) + hidden
        logits: Tensor = self.head(hidden)
        return logits


def captured(model: nn.Module, ids: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the model's forward pass, and the tensor of its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(ids)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(ids)
    return graph, output


@pytest.mark.parametrize("where", ["gpu", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_graph_computes_with_the_exchanged_weights(
    dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHADOW_MEMORY, where)
    torch.manual_seed(0)
    versions = [Tied().to("cuda", dtype) for _ in range(3)]
    ids = torch.arange(ROWS, device="cuda")
    with torch.no_grad():
        live = versions[0]
        expected = [model(ids) for model in versions]
        addresses = [parameter.data_ptr() for parameter in live.parameters()]
        graph, output = captured(live, ids)
        before = fingerprint(live, no_rest)
        shadow = make_shadow(live, torch.device("cuda"))
        for version, logits in zip(versions[1:], expected[1:], strict=True):
            shadow.refresh(no_rest)
            for parameter, loaded in zip(shadow.model.parameters(), version.parameters(), strict=True):
                assert parameter.is_pinned() if where == "host" else parameter.is_cuda
                parameter.copy_(loaded)
            shadow.check(no_rest)
            graph.replay()
            assert not torch.equal(output, logits), "a version that is only staged must not be in use"
            shadow.exchange()
            graph.replay()
            torch.testing.assert_close(output, logits, rtol=0, atol=0)
        assert [parameter.data_ptr() for parameter in live.parameters()] == addresses
        assert fingerprint(live, no_rest) != before
        assert live.head.weight is live.embed.weight


def test_a_shadow_that_does_not_fit_is_in_host_memory_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    live, device = nn.Linear(1 << 14, 1 << 12, bias=False, device="cuda"), torch.device("cuda")
    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(int(free - live.weight.nbytes / FREE_SHARE + (64 << 20)), dtype=torch.uint8, device=device)
    monkeypatch.setenv(SHADOW_MEMORY, "auto")
    assert make_shadow(live, device).model.weight.is_pinned()
    monkeypatch.setenv(SHADOW_MEMORY, "gpu")
    fits = make_shadow(live, device)
    assert fits.model.weight.is_cuda
    more = torch.empty(torch.cuda.mem_get_info()[0] - (64 << 20), dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match=r"publish\.shadow: gpu, but the weights need 0\.3 GB more"):
        make_shadow(live, device)
    assert len(taken) + len(more) < total

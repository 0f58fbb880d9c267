"""Safetensors files whose headers are written before their tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from agentrl.trainer.weights.ownership import Output
from agentrl.trainer.weights.share_writer import WholeFiles
from agentrl.trainer.weights.tensor_file_layout import tensor_files
from agentrl.trainer.weights.weight_stream import Chunk

BF16 = torch.bfloat16


def test_files_are_cut_by_size_and_where_a_tensor_would_not_be_aligned() -> None:
    odd, wide = Output("odd", BF16, (3,)), Output("wide", torch.float32, (5,))
    assert [[f.outputs for f in own] for own in tensor_files([[odd, wide]])] == [[(odd,), (wide,)]]
    assert [[f.outputs for f in own] for own in tensor_files([[wide, odd]])] == [[(wide, odd)]]
    cut = tensor_files([[wide, odd], [odd]], file_bytes=20)
    assert [[f.name for f in own] for own in cut] == [
        ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"],
        ["model-00003-of-00003.safetensors"],
    ]
    assert [f.name for own in tensor_files([[wide], []]) for f in own] == ["model.safetensors"]


def test_tensors_that_come_in_pieces_are_read_back(tmp_path: Path) -> None:
    tensors = {"é": torch.randn(5, 3), "s": torch.tensor(2.0), "b": torch.randn(4, 2).to(BF16)}
    outputs = [Output(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    ((file,),) = tensor_files([outputs])
    first, second, third = outputs
    with WholeFiles(tmp_path, [file]) as whole:
        whole.add([Chunk(first, 0, tensors["é"][:2])])
        whole.add([Chunk(first, 24, tensors["é"][2:]), Chunk(second, 0, tensors["s"]), Chunk(third, 0, tensors["b"])])
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    facts = whole.written["b"]
    assert facts.size_bytes == (tmp_path / facts.name).stat().st_size

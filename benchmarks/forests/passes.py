"""One forward and backward pass over a forest of tokens, in one of three ways, in a process of its own.

packed   the forest in pieces: no mask over all tokens
dense    the forest with a mask of all pairs, as one call of PyTorch's attention
alone    as many tokens as sequences that share nothing, each by transformers' own forward, in one graph
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from forests.shape import branching, independent, model, tree_of
from training.clock import peak_bytes, reset_peak

from agentrl.trainer.attention import tree_attention
from agentrl.trainer.attention.pieces import visible
from agentrl.trainer.attention.tree import Tree
from agentrl.trainer.distributed import keep_freed_memory

SHAPE = {"layers": 4, "hidden": 288, "heads": 9, "groups": 3}
"""The heads of SmolLM2-135M, half as large."""
CPU = torch.device("cpu")


def measured(way: str, tokens: int) -> dict[str, float]:
    """Seconds and bytes of a pass in a new process. Bytes: the peak above the process with its model loaded."""
    code = f"from forests.passes import main; main({way!r}, {tokens})"
    here = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(way: str, tokens: int) -> None:
    """Print the measurements as one line of JSON."""
    torch.set_num_threads(1)
    keep_freed_memory()
    tree_attention.register()
    lm = model(**SHAPE, dtype=torch.float32)  # type: ignore[arg-type]
    run_pass(lm, way, 256)  # gradients and kernels exist now
    before = psutil.Process().memory_info().rss
    reset_peak(CPU)
    start = time.process_time()
    run_pass(lm, way, tokens)
    print(json.dumps({"seconds": time.process_time() - start, "bytes": peak_bytes(CPU) - before}))


def run_pass(lm: Any, way: str, tokens: int) -> None:
    """Forward and backward; the loss is a weighted sum of hidden states."""
    if way == "alone":
        lm.set_attn_implementation("sdpa")
        hidden = [lm(input_ids=_ids(s), use_cache=False).last_hidden_state[0] for s in independent(tokens)]
        torch.cat(hidden).square().sum().backward()  # type: ignore[no-untyped-call]
        return
    made = tree_of(branching(tokens))
    positions = torch.from_numpy(made.positions.astype(np.int64))[None]
    common = {"input_ids": _ids(made.token_ids), "position_ids": positions, "use_cache": False}
    if way == "packed":
        lm.set_attn_implementation(tree_attention.SPLIT)
        tree = Tree(made.ends, made.positions)
        out = lm(**common, attention_mask=tree.marker, tree=tree)
    else:
        lm.set_attn_implementation("sdpa")
        sees = torch.from_numpy(visible(made.ends, made.positions))
        mask = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
        out = lm(**common, attention_mask=mask[None, None])
    out.last_hidden_state.square().sum().backward()


def _ids(sequence: Any) -> torch.Tensor:
    return torch.from_numpy(sequence.astype(np.int64))[None]

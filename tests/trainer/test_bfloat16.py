"""What a policy that computes in bfloat16 gives, against transformers in bfloat16."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support import VOCABULARY, random_trajectory
from torch import Tensor

from agentrl.trainer.distributed import World
from agentrl.trainer.models import mechanisms
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.packing import Sample, collate_share, make_units, plan


def sequences() -> list[Sample]:
    """Four of one group, with a common prompt; all tokens behind it are trained."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 12).tolist()
    made = [random_trajectory(rng, prompt, name=str(k), turns=1, output=40) for k in range(4)]
    return [Sample(t, np.zeros(len(t.input_ids), np.float32)) for t in made]


def of_transformers(folder: Path, *, exact: bool = False) -> Tensor:
    """(S,) with blocks in bfloat16, or with the same weights in float64; the head in float64."""
    from transformers import AutoModelForCausalLM

    lm, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), []
    lm = lm.double() if exact else lm
    for t in (s.tokens for s in sequences()):
        ids = torch.from_numpy(t.input_ids.astype(np.int64))
        with torch.no_grad():
            hidden = lm.base_model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0].double()
            logprobs = torch.log_softmax(hidden @ lm.get_output_embeddings().weight.double().T, -1)
        found.append(logprobs.gather(-1, ids[1:, None])[:, 0][t.loss_mask[1:]])
    return torch.cat(found)


@pytest.mark.parametrize("unpacked", [False, True], ids=["packed", "unpacked"])
def test_hidden_states_are_not_rounded_after_the_blocks(tiny_model: Path, world: World, unpacked: bool) -> None:
    """Unpacked, the hidden states are transformers' own, so that the logprobs are those of its unrounded logits.
    Packed, what the blocks round differs by the order of their sums, but is not more."""
    with patch.object(mechanisms, "unpackable", lambda _: "a test asked for it" if unpacked else ""):
        policy = load_sharded(Policy, tiny_model, world.mesh, dtype=torch.bfloat16)
    budget = policy.budget(4096)
    (by_rank,) = plan(make_units(sequences(), budget), ranks=1, minibatches=1, budget=budget)
    found: dict[str, Tensor] = {}
    for m in collate_share(by_rank, 0, budget):
        with torch.no_grad():
            logprobs_S = policy(m)[0][m.predictions_S]
        found |= {name: logprobs_S[m.trajectories_S == i] for i, name in enumerate(m.trajectory_ids)}
    ours = torch.cat([found[s.tokens.trajectory_id] for s in sequences()])
    theirs = of_transformers(tiny_model)
    if unpacked:
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4)
        return
    exact = of_transformers(tiny_model, exact=True)
    assert (ours - exact).abs().mean() <= 1.1 * (theirs - exact).abs().mean()
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()

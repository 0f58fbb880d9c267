"""How the sequences of each family are computed: the same numbers as transformers' for each alone, or a refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from families import FAMILIES, PACKED, REFUSED, UNPACKED, save_family
from rank_families import steps
from ranks import run_ranks
from steps import assert_close
from support import VOCABULARY, random_trajectory
from torch import Tensor

from agentrl.errors import ModelFolderError, UnknownAttention
from agentrl.trainer.attention.tree import Tree
from agentrl.trainer.attention.tree_attention import SPLIT, register, tree_attention
from agentrl.trainer.distributed import World
from agentrl.trainer.models import mechanisms
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.packing import Sample, collate_share, make_units, plan
from agentrl.trainer.recurrence import carrying

PAGE = Path(__file__).parents[3] / "docs" / "trainer.md"
TRAINED = [name for name, (how, *_) in FAMILIES.items() if how != REFUSED]


def samples() -> list[Sample]:
    """Two sequences with a common prefix, both longer than windows, chunks and the short range of longrope."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, VOCABULARY, 20).tolist()
    tails = [rng.integers(3, VOCABULARY, n).tolist() for n in (24, 20)]
    made = [random_trajectory(rng, prefix, name=str(k), turns=1, outputs=[tail]) for k, tail in enumerate(tails)]
    return [Sample(t, np.zeros(len(t.input_ids), np.float32)) for t in made]


def trained(policy: Policy) -> dict[str, Tensor]:
    """The logprobs of loss tokens, as a step computes them, by trajectory; a backward pass succeeds."""
    budget = policy.budget(10_000)
    (by_rank,) = plan(make_units(samples(), budget), ranks=1, minibatches=1, budget=budget)
    found: dict[str, Tensor] = {}
    for m in collate_share(by_rank, 0, budget):
        logprobs_P, _ = policy(m)
        logprobs_P.sum().backward()
        logprobs_S = logprobs_P.detach()[m.predictions_S]
        found |= {name: logprobs_S[m.trajectories_S == i] for i, name in enumerate(m.trajectory_ids)}
    return found


def alone(folder: Path) -> dict[str, Tensor]:
    """The same of each sequence, by transformers."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if lm.config.model_type == "gemma2":  # transformers' SDPA leaves soft caps out
        lm.set_attn_implementation("eager")
    found = {}
    for t in (s.tokens for s in samples()):
        ids = torch.from_numpy(t.input_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(lm(input_ids=ids[None, :-1], use_cache=False).logits[0], -1)
        found[t.trajectory_id] = logprobs.gather(-1, ids[1:, None])[:, 0][t.loss_mask[1:]]
    return found


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("name", TRAINED)
def test_logprobs_are_those_of_each_sequence_alone(name: str, tmp_path: Path, world: World) -> None:
    policy = load_sharded(Policy, save_family(name, tmp_path), world.mesh)
    how, *_ = FAMILIES[name]
    assert (UNPACKED if policy.unpacked else PACKED) == how, policy.unpacked
    assert apart(trained(policy), alone(tmp_path)) <= 1e-5


@pytest.mark.parametrize("name", ["gpt-oss", "Gemma 3"])
def test_sinks_and_windows_give_the_gradients_of_each_sequence_alone(name: str, tmp_path: Path, world: World) -> None:
    folder = save_family(name, tmp_path)
    packed = load_sharded(Policy, folder, world.mesh)
    with patch.object(mechanisms, "unpackable", lambda _: "a test asked for it"):
        unpacked = load_sharded(Policy, folder, world.mesh)
    for policy in (packed, unpacked):
        trained(policy)
    found, expected = (
        {n: p.grad for n, p in policy.trainable() if p.grad is not None} for policy in (packed, unpacked)
    )
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("name", [name for name, (how, *_) in FAMILIES.items() if how == REFUSED])
def test_an_unsupported_model_is_refused_by_name_in_one_line(name: str, tmp_path: Path, world: World) -> None:
    with pytest.raises(ModelFolderError, match="ForCausalLM: ") as refused:
        load_sharded(Policy, save_family(name, tmp_path), world.mesh)
    assert "\n" not in str(refused.value)


def test_the_documentation_lists_every_family_and_how_it_is_computed() -> None:
    rows = re.findall(r"^\| (packed|unpacked|refused)[^|]*\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert {how: sorted(names.split("; ")) for how, names in rows} == {
        how: sorted(name for name, (its, *_) in FAMILIES.items() if its == how) for how in (PACKED, UNPACKED, REFUSED)
    }


# -- what is not known beforehand is found ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LFM2", "Qwen3-Next", "Nemotron-H", "Llama 4", "Falcon, ALiBi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_unknown_mechanism_is_found_by_comparing(
    name: str, dtype: torch.dtype, tmp_path: Path, world: World
) -> None:
    with patch.object(mechanisms, "unpackable", lambda _: ""), patch.object(carrying, "carry", lambda _: None):
        policy = load_sharded(Policy, save_family(name, tmp_path), world.mesh, dtype=dtype)
    assert re.search("off by|does not take packed sequences", policy.unpacked)


@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "Gemma 3", "gpt-oss", "GPT-2", "Qwen3.5", "LFM2", "Mamba 2"])
def test_rounding_to_bfloat16_does_not_make_a_model_unpackable(name: str, tmp_path: Path, world: World) -> None:
    assert not load_sharded(Policy, save_family(name, tmp_path), world.mesh, dtype=torch.bfloat16).unpacked


def test_a_model_that_looks_ahead_is_refused(tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

    real = Qwen2Attention.forward

    def looks_ahead(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(self, hidden_states + hidden_states.mean(1, keepdim=True), *args, **kwargs)

    monkeypatch.setattr(Qwen2Attention, "forward", looks_ahead)
    with pytest.raises(ModelFolderError, match="Qwen2ForCausalLM is not causal"):
        load_sharded(Policy, tiny_model, world.mesh)


def test_a_model_with_other_logits_is_refused(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "DIVIDED", ())
    with pytest.raises(ModelFolderError, match="GraniteForCausalLM: its logits are not hidden"):
        load_sharded(Policy, save_family("Granite", tmp_path), world.mesh)


def test_a_model_whose_forward_fails_is_refused(
    tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    def needs_a_kernel(*_: Any) -> Tensor:
        raise ImportError("install causal-conv1d\nand a GPU")

    monkeypatch.setattr(Qwen2MLP, "forward", needs_a_kernel)
    with pytest.raises(ModelFolderError, match=r"Qwen2ForCausalLM fails .* forward: install causal-conv1d$"):
        load_sharded(Policy, tiny_model, world.mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_with_nonfinite_packed_states_is_not_packed(
    dtype: torch.dtype, tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflows(self: Policy, *_: Any) -> Tensor:
        return packed(self, *_) * torch.nan

    packed = Policy.packed
    monkeypatch.setattr(Policy, "packed", overflows)
    assert load_sharded(Policy, tiny_model, world.mesh, dtype=dtype).unpacked.endswith("off by inf of their size")


def test_a_model_with_nonfinite_states_is_refused(
    tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    monkeypatch.setattr(Qwen2MLP, "forward", lambda _, hidden: hidden * torch.inf)
    with pytest.raises(ModelFolderError, match="Qwen2ForCausalLM: its hidden states are not finite numbers"):
        load_sharded(Policy, tiny_model, world.mesh)


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"softcap": 30.0}, "softcap"),
        ({"is_causal": False}, "is_causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"indices": torch.zeros(1), "position_ids": torch.zeros(1)}, "indices"),
    ],
)
def test_attention_refuses_unknown_arguments(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UnknownAttention, match=f"Identity attends with {named}$"):
        attend(arguments)


def test_attention_refuses_a_changed_mask() -> None:
    with pytest.raises(UnknownAttention, match="a mask of its own"):
        attend({}, changed=True)


def test_attention_accepts_arguments_without_effect() -> None:
    positions = torch.arange(3)[None]
    same = attend({"position_ids": positions, "use_cache": False, "s_aux": None, "sliding_window": 3})
    torch.testing.assert_close(same, attend({}), rtol=0, atol=0)
    assert not torch.equal(same, attend({"sliding_window": 2}))


def attend(arguments: dict[str, Any], *, changed: bool = False) -> Tensor:
    """Three tokens of one sequence, two heads of size four."""
    tree = Tree(np.full(3, 3, np.int32), np.arange(3, dtype=np.int32))
    q, k, v = torch.randn(3, 1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    given = tree.marker.clone() if changed else tree.marker
    return tree_attention(torch.nn.Identity(), q, k, v, given, tree=tree, **arguments)[0]


# -- on several ranks ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_ranks_decide_alike_and_compute_the_same_step_as_one(tmp_path: Path, world: World) -> None:
    folders = [
        save_family(name, tmp_path / name) for name in ("gpt-oss", "Gemma 2, no cap of logits", "LFM2", "Qwen3.5")
    ]
    alone = steps(folders, world)
    run_ranks("rank_families.py", 2, tmp_path / "out.json", *folders)
    both = json.loads((tmp_path / "out.json").read_text())
    for name, expected in alone.items():
        assert both[name].pop("unpacked") == expected.pop("unpacked")
        assert both[name] == pytest.approx(expected, rel=1e-4)


def test_the_attention_function_is_registered_under_its_own_name() -> None:
    from transformers import AttentionInterface

    register()
    assert AttentionInterface()[SPLIT] is tree_attention

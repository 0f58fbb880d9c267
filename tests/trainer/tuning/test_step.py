"""A step of SFT, DPO or a reward model is what transformers computes sequence by sequence, however it is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import save_family
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from tuning_setup import KINDS, config_of, prepared, random_items

from agentrl.trainer.distributed import World, full
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Sample
from agentrl.trainer.tuning import step
from agentrl.trainer.tuning.items import Item

BETA = 0.1


def plain_logprobs(model: Any, sample: Sample) -> Tensor:
    """Of the trained tokens, from the whole unpacked sequence."""
    ids = torch.from_numpy(sample.tokens.input_ids).long()
    logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
    return logprobs[torch.from_numpy(sample.tokens.loss_mask[1:])]


def plain_loss(kind: str, items: list[Item], model: Any, reference: Any) -> Tensor:
    """The mean loss of a batch, one sequence at a time. Of a pair the chosen sample comes first."""
    if kind == "sft":
        return -torch.cat([plain_logprobs(model, sample) for item in items for sample in item]).mean()
    losses = []
    for item in items:
        if kind == "reward-model":
            chosen, rejected = (
                model(input_ids=torch.from_numpy(s.tokens.input_ids).long()[None]).logits[0, 0] for s in item
            )
            losses.append(-logsigmoid(chosen - rejected))
            continue
        with torch.no_grad():
            before = [plain_logprobs(reference, sample) for sample in item]
        ratios = [plain_logprobs(model, sample) - old for sample, old in zip(item, before, strict=True)]
        if kind == "ipo":
            losses.append((ratios[0].mean() - ratios[1].mean() - 1 / (2 * BETA)) ** 2)
        else:
            losses.append(-logsigmoid(BETA * (ratios[0].sum() - ratios[1].sum())))
    return torch.stack(losses).mean()


def gradients(
    kind: str, items: list[Item], folder: Path, other: Path, world: World, budget: int
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
    """Of one step without clipping: the gradients, the metrics, and the weights before it."""
    config = config_of(kind, tokens_per_microbatch=budget, grad_clip=1e9)
    method, model, packed = prepared(config, items, folder, world, other)
    before = {name: full(p).clone() for name, p in model.trainable()}
    optimizer = make_optimizer(model, config.trainer)
    found: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: found.update({n: full(p.grad).clone() for n, p in model.trainable()}))
    metrics = step.train(model, optimizer, packed, method, 1e-3, config.trainer, world)
    return found, metrics, before


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ of whole gradients."""
    assert a.keys() == b.keys()
    left, right = (torch.cat([g[name].flatten() for name in sorted(a)]).double() for g in (a, b))
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_those_of_separate_sequences(
    kind: str, tiny_model: Path, other_model: Path, world: World
) -> None:
    items = random_items(kind)
    whole, one, weights = gradients(kind, items, tiny_model, other_model, world, 4096)
    if kind == "reward-model":
        model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
        model.config.pad_token_id = None
        model.load_state_dict({name: weights[name] for name, _ in model.named_parameters()})
    else:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.float32)
    loss = plain_loss(kind, items, model, reference)
    loss.backward()
    assert one["loss"] == pytest.approx(loss.item(), rel=1e-5)
    plain = {name: p.grad for name, p in model.named_parameters()}
    assert distance(whole, plain) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_do_not_change_the_step(kind: str, tiny_model: Path, other_model: Path, world: World) -> None:
    items = random_items(kind)
    whole, one, _ = gradients(kind, items, tiny_model, other_model, world, 4096)
    parts, many, _ = gradients(kind, items, tiny_model, other_model, world, 24)
    assert many.keys() == one.keys()
    assert many.pop("tokens_computed") >= one.pop("tokens_computed")  # less of the prompts' beginnings is shared
    for name in one:
        assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert distance(parts, whole) < 1e-5


def test_a_pair_shares_its_prompt(tiny_model: Path, other_model: Path, world: World) -> None:
    items = random_items("dpo", 1)
    lengths = [len(sample.tokens.input_ids) for sample in items[0]]
    prompt = lengths[0] - int(items[0][0].tokens.loss_mask.sum())
    _, metrics, _ = gradients("dpo", items, tiny_model, other_model, world, 4096)
    assert metrics["tokens_computed"] <= sum(lengths) - 2 - prompt


@pytest.mark.long
def test_two_ranks_compute_the_same_step_as_one(tiny_model: Path, other_model: Path, tmp_path: Path) -> None:
    unpacked = save_family("Phi-3, longrope", tmp_path / "unpacked")
    for ranks in (1, 2):
        run_ranks("tuning/rank_tuning.py", ranks, tiny_model, other_model, unpacked, tmp_path)
    parts = ("ranks-1", "ranks-2", "context-2")
    one, *others = (json.loads((tmp_path / f"{part}.json").read_text()) for part in parts)
    for found in others:
        for a, b in zip(one, found, strict=False):
            for name in ("loss", "grad_norm", "tokens_trained", "packed"):
                assert b[name] == pytest.approx(a[name], rel=1e-4), name
    assert [metrics["packed"] for metrics in one] == [1.0] * 2 * len(KINDS) + [0.0] * 4
    assert list(map(len, others)) == [len(one), 2 * len(KINDS)]
    left, *rights = (load_file(tmp_path / f"{part}.safetensors") for part in parts)
    assert left.keys() == rights[0].keys() > rights[1].keys()
    for right in rights:
        for name in right:
            torch.testing.assert_close(right[name], left[name], rtol=1e-4, atol=1e-5)


def test_the_reference_equals_the_model_at_first(tiny_model: Path, world: World) -> None:
    config = config_of("dpo")
    method, model, items = prepared(config, random_items("dpo"), tiny_model, world)
    metrics = step.score(model, items, method, config.trainer, world)
    assert metrics["margin"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss"] == pytest.approx(0.693147, abs=1e-5)


def test_with_an_adapter_the_reference_is_the_base_model(tiny_model: Path, world: World) -> None:
    items = random_items("dpo")
    _, _, plain = prepared(config_of("dpo"), items, tiny_model, world)
    method, model, adapted = prepared(config_of("dpo", lora={"rank": 4}), items, tiny_model, world)
    pairs = [(a, b) for one, other in zip(plain, adapted, strict=True) for a, b in zip(one, other, strict=True)]
    assert all(np.array_equal(a.tokens.logprobs, b.tokens.logprobs) for a, b in pairs)
    config = config_of("dpo", lora={"rank": 4})
    optimizer = make_optimizer(model, config.trainer)
    first, second = (
        step.train(model, optimizer, adapted, method, 1e-2, config.trainer, world)["margin"] for _ in range(2)
    )
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 0

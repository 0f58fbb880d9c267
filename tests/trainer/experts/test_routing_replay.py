"""Replayed routing: the loss and gradients of transformers with forced routers, however the batch is carried out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import EXPERTS, LAYERS, TOP_K, force, random_experts, routed_samples, save_mixture
from plain import load_plain, padded_logprobs, padded_loss
from ranks import run_ranks
from steps import NO_CLIP, Run, assert_close
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from agentrl.configs.algorithm import Algorithm
from agentrl.errors import ModelFolderError
from agentrl.trainer.distributed import World
from agentrl.trainer.experts.routing_replay import Routing
from agentrl.trainer.packing import collate, make_units
from agentrl.trainer.scoring import Scorer

ALLOWED = 2e-5
ON: dict[str, Any] = {"routing_replay": "engine", "grad_clip": NO_CLIP}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("mixture"))


def forced_gradients(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' model in float64, each trajectory by itself, its routers forced."""
    lm, samples = load_plain(folder), routed_samples()
    force(lm, [s.tokens for s in samples])
    loss = padded_loss(lm, samples, Algorithm())
    loss.backward()
    return float(loss.detach()), {f"{name}/0": p.grad for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "how", [{}, {"activation_checkpointing": True}, {"tokens_per_microbatch": 40}, {"unpacked": True}], ids=str
)
def test_loss_and_gradients_are_those_of_forced_routers(mixture: Path, world: World, how: dict[str, Any]) -> None:
    expected, gradients = forced_gradients(mixture)
    found = Run(mixture, world, **ON | how).update(routed_samples())
    assert found.loss == pytest.approx(expected, rel=ALLOWED)
    assert_close(found.gradients, gradients, ALLOWED)
    free = Run(mixture, world, grad_clip=NO_CLIP).update(routed_samples())
    assert abs(free.loss - expected) > 100 * ALLOWED * abs(expected)  # the choice matters


def test_scores_before_the_update_replay_too(mixture: Path, world: World) -> None:
    trajectories = [s.tokens for s in routed_samples()]
    policy = Run(mixture, world, **ON).models.policy
    scores = Scorer(trajectories, 1000, world).score(lambda m: policy(m)[0])
    lm = load_plain(mixture)
    force(lm, trajectories)
    with torch.no_grad():
        logprobs, _ = padded_logprobs(lm, trajectories)
    for row, t, score in zip(logprobs, trajectories, scores, strict=True):
        expected = row[: len(t.input_ids) - 1][torch.from_numpy(t.loss_mask[1:])]
        torch.testing.assert_close(torch.from_numpy(score[t.loss_mask]).double(), expected, atol=1e-4, rtol=1e-4)


def test_the_reference_routes_itself(mixture: Path, world: World) -> None:
    """With equal weights and free routers, the reference's logprobs are those of the free policy."""
    settings: dict[str, Any] = {"algorithm": {"kl_coef": 0.1, "kl": "loss"}, "grad_clip": NO_CLIP}
    free, replayed = (Run(mixture, world, **settings | more) for more in ({}, {"routing_replay": "engine"}))
    trajectories = [s.tokens for s in routed_samples()]
    assert free.step(trajectories).metrics["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert replayed.step(trajectories).metrics["kl_reference"] > 1e-3


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_load_balancing_loss_is_that_of_the_replayed_choice(
    mixture: Path, world: World, checkpointed: bool
) -> None:
    samples = routed_samples(missing=1.0)  # the routers' own choice, as transformers' function counts it
    on = ON | {"activation_checkpointing": checkpointed}
    with_loss, without = (Run(mixture, world, **on, router_aux_loss_coef=coef).update(samples) for coef in (0.5, 0.0))
    lm = load_plain(mixture, torch.float32)
    batch = collate(make_units(samples, 1000))
    tokens = batch.input_ids_N
    rows = [s.tokens.input_ids[: int(s.tokens.loss_mask.nonzero()[0][-1])] for s in samples]
    logits: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    seen: set[bytes] = set()
    for row in rows:  # each distinct beginning counts once, as it is computed once
        outputs = lm(input_ids=torch.from_numpy(row)[None].long(), output_router_logits=True).router_logits
        new = [at for at in range(len(row)) if row[: at + 1].tobytes() not in seen]
        seen |= {row[: at + 1].tobytes() for at in new}
        for layer, output in enumerate(outputs):
            logits[layer].append(output[new])
    joined = tuple(torch.cat(parts) for parts in logits)
    assert len(joined[0]) == len(tokens)
    balance = load_balancing_loss_func(joined, EXPERTS, TOP_K)
    assert with_loss.metrics["router_aux_loss"] == pytest.approx(float(balance.detach()), rel=1e-4)
    assert "router_aux_loss" not in without.metrics
    balance.backward()
    added = {name: with_loss.gradients[name] - g for name, g in without.gradients.items()}
    expected = {f"{n}/0": 0.5 * p.grad for n, p in lm.named_parameters() if p.grad is not None}
    for name in (name for name in expected if "gate.weight" in name):
        torch.testing.assert_close(added[name], expected[name], atol=2e-6, rtol=2e-3)


def test_a_step_reports_loads_and_disagreements(mixture: Path, world: World) -> None:
    metrics = Run(mixture, world, **ON).update(routed_samples(missing=0.0)).metrics
    assert metrics["routing/disagreements"] == 0
    assert 1 < metrics["routing/load_max"] < EXPERTS
    assert 0.5 < metrics["routing/load_entropy"] < 1


@pytest.mark.parametrize(
    "group",
    ["replica", pytest.param("context", marks=pytest.mark.long), pytest.param("experts", marks=pytest.mark.long)],
)
def test_two_ranks_compute_what_one_does(mixture: Path, world: World, tmp_path: Path, group: str) -> None:
    """With checkpointing and the load-balancing loss, in float32: they divide weights, tokens, or experts."""
    run_ranks("rank_routing.py", 2, mixture, tmp_path, group)
    one = Run(mixture, world, **ON, tokens_per_microbatch=40).update(routed_samples())
    on = ON | {"router_aux_loss_coef": 0.1}
    balanced = Run(mixture, world, **on, tokens_per_microbatch=40).update(routed_samples()).metrics["router_aux_loss"]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        assert found["metrics"]["loss"] == pytest.approx(one.loss, rel=1e-5)
        assert found["loads"] == found["metrics"]["tokens_computed"] * TOP_K * LAYERS
        assert_close(found["gradients"], one.gradients, 2e-5)
        assert found["balanced"] == pytest.approx(
            balanced, rel=0.1
        )  # each rank balances its own microbatches or tokens


def test_a_model_without_experts_is_refused(tiny_model: Path, world: World) -> None:
    for settings in ({"routing_replay": "engine"}, {"router_aux_loss_coef": 0.1}):
        with pytest.raises(ModelFolderError, match="need a mixture-of-experts model"):
            Run(tiny_model, world, **settings)


def test_a_pass_that_does_not_replay_is_left_alone(mixture: Path, world: World) -> None:
    """Routes without the setting change nothing, and routes of another number of tokens are an error."""
    off, samples = Run(mixture, world).models.policy, routed_samples()
    units = make_units(samples, 1000)
    batch = collate(units)
    assert batch.routes is not None
    routing = off.routing
    assert isinstance(routing, Routing)
    plain = off(batch)[0]
    batch.routes = None
    assert torch.equal(off(batch)[0], plain)
    on = Run(mixture, world, **ON).models.policy
    whole = collate(units, len(samples))
    assert whole.routes is not None
    batch.routes = whole.routes
    with pytest.raises(AssertionError, match="routes of"):
        on(batch)


def test_random_experts_are_sets() -> None:
    import numpy as np

    one = random_experts(np.random.default_rng(0), 50)
    assert all(len(set(chosen.tolist())) == TOP_K for chosen in one.ids.reshape(-1, TOP_K))

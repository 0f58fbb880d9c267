"""Several teachers, teachers that read other prompts, and the policy as its own teacher: by separate sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import load_plain
from support import AGES, VOCABULARY, random_samples, save_tiny_model
from torch import Tensor

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.errors import NonFiniteError
from agentrl.trainer.distributed import World
from agentrl.trainer.models import run_models
from agentrl.trainer.models.run_models import Models, make_models
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.teachers.lessons import Lessons, first_sampled, moved
from agentrl.trainer.teachers.teacher_prompts import after
from agentrl.trainer.update import update_policy

SOURCES = {"g0": "sums", "g1": "words", "g2": "riddles"}


@pytest.fixture
def teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two models of other sizes than the student, in folders without tokenizers."""
    monkeypatch.setattr(run_models, "resolve_model", Path)
    monkeypatch.setattr(run_models, "check_same_tokens", lambda *_: None)
    first = save_tiny_model(tmp_path / "first", seed=5, hidden_size=48)
    return str(first), str(save_tiny_model(tmp_path / "second", seed=6, num_hidden_layers=2))


def trajectories() -> list[TrajectoryTokens]:
    return [s.tokens for s in random_samples()]


def hint_of(one: TrajectoryTokens) -> list[int]:
    """Prompts that differ between two trajectories with a common beginning; no prompt for one of them."""
    if one.trajectory_id == "g1-t3":
        return []
    rng = np.random.default_rng([int(one.group_id[1]), one.trajectory_id == "g0-t1"])
    return [int(token) for token in rng.integers(3, VOCABULARY, 9 + int(one.group_id[1]))]


def reads(batch: Any) -> list[TrajectoryTokens | None]:
    hints = [hint_of(one) for one in batch]
    return [after(np.array(hint, np.int32), one) if hint else None for hint, one in zip(hints, batch, strict=True)]


def plain_logits(lm: Any, one: TrajectoryTokens, prompt: list[int] | None = None) -> Tensor:
    """(S, V) float64 logits / temperature at the loss tokens, after another prompt."""
    first = first_sampled(one)
    before = one.input_ids[:first].tolist() if prompt is None else prompt
    ids = torch.tensor([*before, *one.input_ids[first:].tolist()])
    where = torch.from_numpy(np.flatnonzero(one.loss_mask) - first + len(before))
    heat = torch.from_numpy(one.temperatures[one.loss_mask]).double()
    logits: Tensor = lm(input_ids=ids[None]).logits[0, where - 1]
    return logits / heat[:, None]


def plain_logprobs(lm: Any, one: TrajectoryTokens, prompt: list[int] | None = None) -> Tensor:
    targets = torch.from_numpy(one.input_ids[one.loss_mask]).long()
    return torch.log_softmax(plain_logits(lm, one, prompt), -1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("hinted", [False, True])
def test_each_source_is_taught_by_its_teacher_alone(
    tiny_model: Path, teachers: tuple[str, str], world: World, hinted: bool
) -> None:
    batch, (first, second) = trajectories(), teachers
    by_source = {"sums": first, "words": second}
    config = TrainerConfig(algorithm={"distill_coef": 0.5, "reward_weight": 0.3}, teacher=by_source)
    models = make_models(tiny_model, config, world)
    lessons = Lessons(by_source, SOURCES, reads if hinted else None)
    share = make_samples(batch, config.algorithm, models, 64, world, lessons=lessons)
    plain = TrainerConfig()
    of_rewards = make_samples(batch, plain.algorithm, make_models(tiny_model, plain, world), 64, world)
    student, known = load_plain(tiny_model), {name: load_plain(Path(name)) for name in teachers}
    taught = 0
    for sample, alone in zip(share.samples, of_rewards.samples, strict=True):
        t, mask = sample.tokens, sample.tokens.loss_mask
        expected = 0.3 * alone.advantages[mask]
        name = by_source.get(SOURCES[t.group_id])
        hint = hint_of(t) if hinted else None
        assert sample.teacher is not None
        if name is None or hint == []:
            assert np.isnan(sample.teacher).all()
        else:
            with torch.no_grad():
                own, other = plain_logprobs(student, t), plain_logprobs(known[name], t, hint)
            np.testing.assert_allclose(sample.teacher[mask], other.numpy(), rtol=1e-4, atol=1e-5)
            expected = expected - 0.5 * (own - other).numpy()
            taught += int(mask.sum())
        np.testing.assert_allclose(sample.advantages[mask], expected, rtol=1e-4, atol=1e-5)
        assert not sample.advantages[~mask].any()
    metrics = step(models, config, share, world)
    assert metrics["tokens_taught"] == taught < metrics["tokens_trained"]


def test_a_teacher_reads_only_what_it_teaches(tiny_model: Path, teachers: tuple[str, str], world: World) -> None:
    batch, (first, second) = trajectories(), teachers
    by_source = {"sums": first, "words": second}
    config = TrainerConfig(algorithm={"distill_coef": 0.5}, teacher=by_source)
    models = make_models(tiny_model, config, world)
    make_samples(batch, config.algorithm, models, 4096, world, lessons=Lessons(by_source, SOURCES))
    counts = {name: models.teachers[name].counted.taken() for name in teachers}
    alone = make_models(tiny_model, config, world)
    for name, group in ((first, "g0"), (second, "g1")):
        mine = [t for t in batch if t.group_id == group]
        lessons = Lessons(by_source, SOURCES)
        make_samples(mine, config.algorithm, alone, 4096, world, lessons=lessons)
        assert alone.teachers[name].counted.taken() == counts[name]


def test_one_model_of_several_sources_is_loaded_once(tiny_model: Path, teachers: tuple[str, str], world: World) -> None:
    config = TrainerConfig(algorithm={"distill_coef": 0.5}, teacher={"a": teachers[0], "b": teachers[0]})
    assert list(make_models(tiny_model, config, world).teachers) == [teachers[0]]


def step(models: Models, config: TrainerConfig, samples: Any, world: World) -> dict[str, float]:
    optimizer = torch.optim.SGD([p for _, p in models.policy.trainable()], lr=0.0)
    return update_policy(models.policy, optimizer, samples, 1, AGES, config, world, teachers=models.teachers)


DIVERGENCES = {
    "reverse": lambda p, q: (p.exp() * (p - q)).sum(-1),
    "forward": lambda p, q: (q.exp() * (q - p)).sum(-1),
}


@pytest.mark.parametrize("budget", [40, 4096])
@pytest.mark.parametrize("kind", ["sources", "hinted", "policy"])
@pytest.mark.parametrize(("divergence", "top_k"), [("reverse", None), ("forward", 7)])
def test_the_gradient_of_full_distillation_is_that_of_separate_sequences(
    tiny_model: Path,
    teachers: tuple[str, str],
    world: World,
    kind: str,
    divergence: str,
    top_k: int | None,
    budget: int,
) -> None:
    batch = trajectories()
    by_source = {"sums": teachers[0], "words": "policy" if kind == "policy" else teachers[1]}
    config = TrainerConfig(
        algorithm={
            "distill_coef": 0.5,
            "distill": "full",
            "distill_divergence": divergence,
            "distill_top_k": top_k,
            "reward_weight": 0.0,
            "aggregation": "token_mean",
        },
        teacher=by_source,
        teacher_prompt="hint",
        grad_clip=1e9,
        tokens_per_microbatch=budget,
    )
    models = make_models(tiny_model, config, world)
    found: dict[str, Tensor] = {}
    for name, p in models.policy.trainable():
        p.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: p.grad.clone()}))
    lessons = Lessons(by_source, SOURCES, None if kind == "sources" else reads)
    share = make_samples(batch, config.algorithm, models, budget, world, lessons=lessons)
    metrics = step(models, config, share, world)

    lm = load_plain(tiny_model)
    known = {name: load_plain(tiny_model if name == "policy" else Path(name)) for name in by_source.values()}
    total, taught, tokens = torch.zeros((), dtype=torch.float64), 0, 0
    for t in batch:
        tokens += int(t.loss_mask.sum())
        teacher, hint = by_source.get(SOURCES[t.group_id]), None if kind == "sources" else hint_of(t)
        if teacher is None or hint == []:
            continue
        own = plain_logits(lm, t)
        with torch.no_grad():
            theirs = plain_logits(known[teacher], t, hint)
        if top_k is not None:
            kept = theirs.topk(top_k).indices
            own, theirs = own.gather(1, kept), theirs.gather(1, kept)
        total = total + DIVERGENCES[divergence](torch.log_softmax(own, -1), torch.log_softmax(theirs, -1)).sum()
        taught += len(own)
    (0.5 * total / tokens).backward()
    assert metrics["tokens_taught"] == taught < tokens
    assert metrics["kl_teacher"] == pytest.approx(total.item() / taught, rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.5 * total.item() / tokens, rel=1e-5)
    for name, p in lm.named_parameters():
        torch.testing.assert_close(found[name].double(), p.grad, rtol=1e-4, atol=1e-6)


def test_the_policy_with_its_own_prompt_teaches_itself_nothing(tiny_model: Path, world: World) -> None:
    batch = trajectories()
    algorithm = {"distill_coef": 1.0, "distill": "full", "reward_weight": 0.0}
    config = TrainerConfig(algorithm=algorithm, teacher="policy", teacher_prompt="hint")
    models = make_models(tiny_model, config, world)
    assert models.teachers == {"policy": models.policy}
    share = make_samples(batch, config.algorithm, models, 4096, world, lessons=Lessons("policy"))
    metrics = step(models, config, share, world)
    assert metrics["kl_teacher"] == pytest.approx(0, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(0, abs=1e-6)


def test_a_prompt_changes_no_token_from_the_first_sampled_one_on() -> None:
    for one in trajectories():
        prompt = np.arange(3, 20, dtype=np.int32)
        read, first = after(prompt, one), first_sampled(one)
        assert read.length == one.length - first + len(prompt)
        np.testing.assert_array_equal(read.input_ids[: len(prompt)], prompt)
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "temperatures"):
            np.testing.assert_array_equal(getattr(read, name)[len(prompt) :], getattr(one, name)[first:])
            assert getattr(read, name).dtype == getattr(one, name).dtype
        assert not read.loss_mask[: len(prompt)].any()
        scores = np.arange(read.length, dtype=np.float32)
        back = moved(scores, one)
        assert not back[:first].any()
        np.testing.assert_array_equal(back[first:], scores[len(prompt) :])


def test_a_teacher_that_scores_nan_is_an_error(tiny_model: Path, teachers: tuple[str, str], world: World) -> None:
    config = TrainerConfig(algorithm={"distill_coef": 1.0}, teacher="http://t")
    models = make_models(tiny_model, config, world)
    assert not models.teachers
    lessons = Lessons("http://t", ask=lambda _, read: [np.full(one.length, np.nan, np.float32) for one in read])
    with pytest.raises(NonFiniteError, match="http://t scored trajectory g0-t0 with nan"):
        make_samples(trajectories(), config.algorithm, models, 4096, world, lessons=lessons)

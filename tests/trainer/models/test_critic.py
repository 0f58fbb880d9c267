"""The critic: its values, what follows from them, and what it learns; the loss and GAE alone: algorithms/test_parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import save_kind
from plain import load_plain
from safetensors.torch import load_file, save_file
from steps import ALLOWED, assert_close, keep_gradients
from support import AGES, random_samples, random_trajectory, save_tiny_model

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import LoraConfig, TrainerConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.errors import ModelFolderError
from agentrl.trainer.algorithms.gae import gae_advantages, token_rewards
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.critic import Critic, Learner, explained_variance
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.rank_parts import owned
from agentrl.trainer.models.run_models import Models, make_models
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import collate, make_units
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.tuning.reward_model import RewardModel, export
from agentrl.trainer.update import update_policy

PPO = Algorithm(preset="ppo")
PLAIN = {"preset": "ppo", "normalization": "none"}


def trajectory(turn_returns: list[float], masked: tuple[int, ...] = (), output: int = 3) -> TrajectoryTokens:
    """Turns of `output` tokens; those of the turns in `masked` are out of the loss."""
    t = random_trajectory(np.random.default_rng(0), [3, 4], turns=len(turn_returns), output=output)
    return dataclasses.replace(
        t,
        loss_mask=t.loss_mask & ~np.isin(t.turn_ids, masked),
        turn_returns=np.array(turn_returns, np.float64),
        episode_return=turn_returns[0],
    )


# -- rewards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn_returns", "masked", "algorithm", "expected"),
    [
        ([3.0, 2.0], (), {}, [0, 0, 1, 0, 0, 2]),  # 1 for the first turn, 2 for the second
        ([3.0, 2.0, 5.0], (1,), {}, [0, 0, -2, 0, 0, 5]),  # a turn that is out of the loss is no state
        ([3.0, 2.0], (1,), {}, [0, 0, 3]),
        ([3.0, 2.0], (0, 1), {}, []),
        ([3.0, 2.0], (), {"credit": "trajectory"}, [0, 0, 0, 0, 0, 3]),
        ([3.0, 2.0], (), {"overlong_tokens": 6, "overlong_buffer": 2}, [0, 0, 1, 0, 0, 1]),
    ],
)
def test_rewards_from_a_turn_on_sum_up_to_its_return(
    turn_returns: list[float], masked: tuple[int, ...], algorithm: Any, expected: list[float]
) -> None:
    t, chosen = trajectory(turn_returns, masked), Algorithm(**{"preset": "ppo"} | algorithm)
    penalties = {t.episode_id: -1.0 if chosen.overlong_tokens else 0.0}
    assert token_rewards([t], chosen, penalties).tolist() == expected


# -- advantages ----------------------------------------------------------------------------------------------------


def batch(seed: int) -> tuple[list[TrajectoryTokens], list[Any], list[Any]]:
    """Trajectories, values and costs, 0 but at loss tokens; one trajectory has none."""
    rng = np.random.default_rng(seed)
    found = [
        dataclasses.replace(
            trajectory(rng.normal(size=n).tolist(), masked, output),
            trajectory_id=f"t{i}",
            episode_id=f"e{i}",
        )
        for i, (n, masked, output) in enumerate([(2, (), 3), (1, (), 1), (3, (1,), 2), (2, (0, 1), 2), (4, (0, 3), 4)])
    ]
    values, costs = (
        [(rng.normal(size=len(t.loss_mask)) * t.loss_mask).astype(np.float32) for t in found] for _ in range(2)
    )
    return found, values, costs


def by_hand(
    t: TrajectoryTokens, values: Any, costs: Any, gamma: float, lambda_: float, end: float = 0.0, level: str = "token"
) -> list[float]:
    """Eq. 16 of arXiv 1506.02438, as a double loop; rewards from the last token of each turn backwards. `end` is the
    value after the last token.
    """
    own = np.flatnonzero(t.loss_mask).tolist()
    rewards, following = {}, 0.0
    for k, at in reversed(list(enumerate(own))):
        last = k + 1 == len(own) or t.turn_ids[own[k + 1]] != t.turn_ids[at]
        rewards[at] = -float(costs[at])
        if last:
            rewards[at] += float(t.turn_returns[t.turn_ids[at]]) - following
            following = float(t.turn_returns[t.turn_ids[at]])
    steps = [[at] for at in own]
    if level == "turn":
        steps = [[at for at in own if t.turn_ids[at] == turn] for turn in sorted({*t.turn_ids[t.loss_mask].tolist()})]
    found = []
    for i, tokens in enumerate(steps):
        a = 0.0
        for k in range(i, len(steps)):
            reward, value = sum(rewards[at] for at in steps[k]), float(values[steps[k][0]])
            after = float(values[steps[k + 1][0]]) if k + 1 < len(steps) else end
            a += (gamma * lambda_) ** (k - i) * (reward + gamma * after - value)
        found += [a] * len(tokens)
    return found


def of_turns(t: TrajectoryTokens, values: Any) -> Any:
    """At each loss token, the value of the first loss token of its turn."""
    own = np.flatnonzero(t.loss_mask)
    turns = t.turn_ids[own]
    return np.array([values[own[turns == turn][0]] for turn in turns])


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gae_advantages_equal_a_double_loop(
    seed: int, gamma: float, lambda_: float, whiten: bool, level: Any, truncated: bool
) -> None:
    trajectories, values, costs = batch(seed)
    algorithm = Algorithm(
        preset="ppo",
        gae_gamma=gamma,
        gae_lambda=lambda_,
        normalization="whiten" if whiten else "none",
        advantage_level=level,
    )
    ends = np.random.default_rng(seed).normal(size=len(trajectories)).tolist() if truncated else None
    advantages, targets = gae_advantages(trajectories, algorithm, values, costs, ends=ends)
    plain = [
        by_hand(t, value, cost, gamma, lambda_, end, level)
        for t, value, cost, end in zip(trajectories, values, costs, ends or [0.0] * len(trajectories), strict=True)
    ]
    everything = np.array([a for one in plain for a in one])
    for t, got, target, value, expected in zip(trajectories, advantages, targets, values, plain, strict=True):
        own = t.loss_mask
        known = value[own] if level == "token" else of_turns(t, value)
        np.testing.assert_allclose(target[own], np.array(expected) + known, rtol=1e-5, atol=1e-6)
        if whiten:
            expected = (np.array(expected) - everything.mean()) / (everything.std() + 1e-6)
        np.testing.assert_allclose(got[own], expected, rtol=1e-5, atol=1e-6)
        assert not got[~own].any()
        assert not target[~own].any()


def test_without_discount_the_target_equals_the_turns_return() -> None:
    trajectories, values, _ = batch(0)
    _, targets = gae_advantages(trajectories, PPO, values)
    for t, target in zip(trajectories, targets, strict=True):
        expected = t.turn_returns[t.turn_ids[t.loss_mask]]
        np.testing.assert_allclose(target[t.loss_mask], expected, rtol=1e-5, atol=1e-6)


# -- the model -----------------------------------------------------------------------------------------------------


def critic_of(model: Path, world: World, **options: Any) -> Critic:
    """With a value head that is not 0, so that its body has a gradient."""
    critic = load_sharded(Critic, model, world.mesh, **options)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in critic.value.parameters():
            owned(p)[0].copy_(torch.randn(p.shape) * 0.1)
    return critic


def judged(model: Path, world: World, critic: Critic) -> list[Any]:
    """Samples, with values."""
    learner = Learner(critic, torch.optim.SGD([p for _, p in critic.trainable()], lr=1.0))
    models = Models(policy=load_sharded(Policy, model, world.mesh), critic=learner)
    trajectories = [s.tokens for s in random_samples()]
    return make_samples(trajectories, Algorithm(**PLAIN), models, 4096, world).samples


def test_a_new_critic_predicts_zero(tiny_model: Path, world: World) -> None:
    critic = load_sharded(Critic, tiny_model, world.mesh)
    with torch.no_grad():
        assert not critic(collate(make_units(random_samples(), 4096))).any()
    samples = judged(tiny_model, world, critic)
    assert explained_variance(samples, PPO) == pytest.approx(0)


def plain_values(model: Path, critic: Critic, samples: list[Any]) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """float64 values at loss tokens, every trajectory by itself, by transformers alone; and its model."""
    lm = load_plain(model)
    head = torch.nn.Linear(32, 1, dtype=torch.float64)
    head.load_state_dict({name: full(p).double() for name, p in critic.value.named_parameters()})
    lm.value = head
    values = []
    for s in samples:
        hidden = lm.model(input_ids=torch.from_numpy(s.tokens.input_ids.astype(np.int64))[None]).last_hidden_state[0]
        values.append(head(hidden[np.flatnonzero(s.tokens.loss_mask) - 1]).squeeze(-1))
    return lm, values


def test_siblings_share_the_value_of_the_state_before_a_token(tiny_model: Path, world: World) -> None:
    critic = critic_of(tiny_model, world)
    samples = judged(tiny_model, world, critic)
    _, expected = plain_values(tiny_model, critic, samples)
    for s, values in zip(samples, expected, strict=True):
        np.testing.assert_allclose(s.values[s.tokens.loss_mask], values.detach(), rtol=1e-4, atol=1e-5)
    first, second = (s.values[s.tokens.turn_ids == 0] for s in samples[:2])  # alike in their first turn
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(samples[0].advantages, samples[1].advantages)


@pytest.mark.parametrize("budget", [4096, 24])
def test_a_truncated_episode_goes_on_with_the_value_of_its_last_state(
    tiny_model: Path, world: World, budget: int
) -> None:
    critic = critic_of(tiny_model, world)
    trajectories = [s.tokens for s in random_samples()]
    cut = [dataclasses.replace(t, truncated=i % 2 == 0) for i, t in enumerate(trajectories)]
    models = Models(
        policy=load_sharded(Policy, tiny_model, world.mesh),
        critic=Learner(critic, torch.optim.SGD([p for _, p in critic.trainable()], lr=1.0)),
    )
    parts = PLAIN | {"gae_gamma": 0.9, "gae_lambda": 0.8}
    share = make_samples(cut, Algorithm(**parts, bootstrap_truncated=True), models, budget, world)
    lm: Any = plain_values(tiny_model, critic, [])[0]
    for i, sample in enumerate(share.samples):
        t = cut[share.indices[i]]
        with torch.no_grad():
            ids = torch.from_numpy(t.input_ids.astype(np.int64))[None]
            hidden = lm.model(input_ids=ids).last_hidden_state[0]
            values = np.append(0.0, lm.value(hidden).squeeze(-1).numpy())  # [i]: of the state before token i
        assert sample.values is not None
        np.testing.assert_allclose(sample.values[t.loss_mask], values[:-1][t.loss_mask], rtol=1e-4, atol=1e-5)
        expected = by_hand(t, values[:-1], np.zeros(t.length), 0.9, 0.8, end=values[-1] if t.truncated else 0.0)
        np.testing.assert_allclose(sample.advantages[t.loss_mask], expected, rtol=1e-4, atol=1e-5)
    plain = make_samples(cut, Algorithm(**parts), models, budget, world).samples
    for sample, own, t in zip(share.samples, plain, (cut[i] for i in share.indices), strict=True):
        assert sample.tokens is t
        assert np.allclose(sample.advantages, own.advantages, rtol=1e-4, atol=1e-5) != t.truncated


@pytest.mark.parametrize("budget", [4096, 24])
@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("value_clip", [0.2, None])
@pytest.mark.parametrize("train_layers", [None, 1])
def test_the_critics_gradient_equals_that_of_separate_trajectories(
    tiny_model: Path, world: World, budget: int, value_clip: float | None, train_layers: int | None, level: str
) -> None:
    critic = critic_of(tiny_model, world, train_layers=train_layers)
    samples = judged(tiny_model, world, critic)
    rng = np.random.default_rng(0)  # as if the critic had moved since: some values are beyond the clip
    samples = [
        dataclasses.replace(s, values=s.values + rng.normal(0, 0.3, len(s.values)).astype(np.float32)) for s in samples
    ]
    lm, values = plain_values(tiny_model, critic, samples)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for s, now in zip(samples, values, strict=True):
        old, target = (torch.from_numpy(x[s.tokens.loss_mask]).double() for x in (s.values, s.targets))
        if level == "turn":
            turns = s.tokens.turn_ids[s.tokens.loss_mask].tolist()
            first = [turns.index(turn) for turn in sorted({*turns})]
            now, old, target = now[first], old[first], target[first]
        count += len(now)
        losses = (now - target) ** 2
        if value_clip is not None:
            near = old + torch.clip(now - old, -value_clip, value_clip)
            losses = torch.maximum(losses, (near - target) ** 2)
        total = total + losses.sum() / 2
    (total / count).backward()
    expected = {n.removeprefix("model."): p.grad for n, p in lm.named_parameters() if p.grad is not None}

    learner = Learner(critic, torch.optim.SGD([p for _, p in critic.trainable()], lr=0.0))
    config = TrainerConfig(
        algorithm=PLAIN | {"value_clip": value_clip, "advantage_level": level},
        tokens_per_microbatch=budget,
        grad_clip=1e9,
    )
    policy = load_sharded(Policy, tiny_model, world.mesh)
    optimizer = torch.optim.SGD([p for _, p in policy.trainable()], lr=0.0)
    found: dict[str, torch.Tensor] = {}
    keep_gradients("", critic, learner.optimizer, found)
    metrics = update_policy(policy, optimizer, samples, 1, AGES, config, world, learner)
    assert metrics["value_loss"] == pytest.approx(total.item() / count, rel=ALLOWED / 2)
    wanted = {f"{n}/0": g for n, g in expected.items() if train_layers is None or _trained(n)}
    assert_close(found, wanted, ALLOWED / 2)


def _trained(name: str) -> bool:
    return name.startswith(("layers.2.", "norm.", "value."))


def test_the_critic_learns_the_returns(tiny_model: Path, world: World) -> None:
    critic = load_sharded(Critic, tiny_model, world.mesh)
    policy = load_sharded(Policy, tiny_model, world.mesh)
    learner = Learner(critic, torch.optim.AdamW([p for _, p in critic.trainable()], lr=3e-3))
    still = torch.optim.SGD([p for _, p in policy.trainable()], lr=0.0)
    config = TrainerConfig(algorithm="ppo", minibatches=2)
    trajectories = [s.tokens for s in random_samples()]
    models = Models(policy=policy, critic=learner)
    metrics = []
    for _ in range(15):
        samples = make_samples(trajectories, config.algorithm, models, 4096, world)
        metrics.append(update_policy(policy, still, samples, 1, AGES, config, world, learner))
    assert metrics[0]["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["explained_variance"] > 0.5
    assert metrics[-1]["value_loss"] < metrics[0]["value_loss"] / 2
    assert metrics[0]["value_grad_norm"] > 0


def test_a_warm_up_moves_the_critic_and_leaves_the_policy(tiny_model: Path, world: World) -> None:
    config = TrainerConfig(algorithm="ppo", critic_lr=1e-2, lr=1e-2)
    models = make_models(tiny_model, config, world)
    optimizer = make_optimizer(models.policy, config)
    trajectories = [s.tokens for s in random_samples()]
    assert models.critic is not None

    def weights(model: Any) -> dict[str, torch.Tensor]:
        return {name: full(p).clone() for name, p in model.trainable()}

    def step(*, only_critic: bool) -> dict[str, float]:
        share = make_samples(trajectories, config.algorithm, models, config.token_budget, world)
        learner = models.critic
        return update_policy(models.policy, optimizer, share, 1, AGES, config, world, learner, only_critic=only_critic)

    policy, critic = weights(models.policy), weights(models.critic.critic)
    metrics = step(only_critic=True)
    assert all(torch.equal(before, weights(models.policy)[name]) for name, before in policy.items())
    assert any(not torch.equal(before, weights(models.critic.critic)[name]) for name, before in critic.items())
    assert "grad_norm" not in metrics
    assert metrics["value_grad_norm"] > 0
    assert not optimizer.state
    assert step(only_critic=False)["grad_norm"] > 0
    assert any(not torch.equal(before, weights(models.policy)[name]) for name, before in policy.items())


# -- a reward model as the beginning -------------------------------------------------------------------------------


def reward_folder(base: Path, out: Path, world: World, adapter: LoraConfig = LoraConfig()) -> Path:
    """What `agentrl reward-model` writes, of a model whose trained tensors are not the base model's; and its scores."""
    model = load_sharded(RewardModel, base, world.mesh, adapter=adapter)
    torch.manual_seed(3)
    with torch.no_grad():
        for _, p in model.trainable():
            owned(p)[0].add_(torch.randn(p.shape) * 0.05)
        scores = model(collate(make_units(random_samples(), 4096)))
    export(out, model, base, adapter, world)
    torch.save(scores, out / "scores")
    return out / "model"


def begun(base: Path, folder: Path, world: World, **settings: Any) -> Critic:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.trainer.models.run_models.resolve_model", Path)
        patch.setattr("agentrl.trainer.models.run_models.check_same_tokens", lambda *_: None)
        models = make_models(base, TrainerConfig(algorithm="ppo", critic_from=folder, **settings), world)
    assert models.critic is not None
    return models.critic.critic


@pytest.mark.parametrize("kind", ["qwen2-untied", "llama-tied", "qwen3-experts"])
@pytest.mark.parametrize("settings", [{}, {"train_layers": 1}, {"lora": LoraConfig(rank=2, alpha=4)}])
def test_a_critic_from_a_reward_model_predicts_its_scores(
    kind: str, settings: dict[str, Any], tmp_path: Path, world: World
) -> None:
    base = save_kind(kind, tmp_path / "base")
    folder = reward_folder(base, tmp_path, world)
    critic = begun(base, folder, world, **settings)
    with torch.no_grad():
        found = critic(collate(make_units(random_samples(), 4096)))
    torch.testing.assert_close(found, torch.load(tmp_path / "scores"), rtol=1e-5, atol=1e-5)
    assert found.any()


def test_a_reward_models_merged_adapter_is_a_part_of_the_critic(tiny_model: Path, tmp_path: Path, world: World) -> None:
    folder = reward_folder(tiny_model, tmp_path, world, LoraConfig(rank=2, alpha=4))
    with torch.no_grad():
        found = begun(tiny_model, folder, world)(collate(make_units(random_samples(), 4096)))
    torch.testing.assert_close(found, torch.load(tmp_path / "scores"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"num_hidden_layers": 2}, r"another architecture than the run's model: it lacks model\.layers\.2\."),
        ({"num_hidden_layers": 4}, r"another architecture than the run's model: it also has model\.layers\.3\."),
        ({"hidden_size": 16}, r"embed_tokens\.weight has shape \(\d+, 16\), the model has \(\d+, 32\)"),
        ({"vocab_size": 50}, r"embed_tokens\.weight has shape \(50, 32\)"),
    ],
)
def test_a_reward_model_of_another_architecture_is_refused(
    sizes: dict[str, int], expected: str, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    folder = tmp_path / "model"
    tensors = load_file(save_tiny_model(folder, **sizes) / "model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros(1, 32)}, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=rf"trainer\.critic_from: .*{expected}"):
        begun(tiny_model, folder, world)


def test_a_model_without_a_head_of_one_output_is_refused(tiny_model: Path, tmp_path: Path, world: World) -> None:
    with pytest.raises(ModelFolderError, match=r"has no score\.weight, the head of a model of `agentrl reward-model`"):
        begun(tiny_model, tiny_model, world)
    folder = reward_folder(tiny_model, tmp_path, world)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros(3, 32)}, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"score\.weight has shape \(3, 32\), the model has \(1, 32\)"):
        begun(tiny_model, folder, world)


def test_only_algorithms_with_a_critic_begin_with_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="critic_from needs an algorithm with a critic"):
        TrainerConfig(algorithm="grpo", critic_from=tmp_path)

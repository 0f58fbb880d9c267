"""Trains one small model by every algorithm on the same task, and draws the curves.

    python benchmarks/estimators.py --out benchmarks/results/estimators.json --figure docs/assets/estimators.png

The model has random weights and 64 tokens. It answers eight prompts with three tokens; the reward is 1 if two of them
are multiples of three, else 0. Each step samples a group of eight answers to every prompt from the present weights,
and all algorithms have the same learning rate. Curves are the mean reward of the sampled answers.

- `reward/PRESET`: of the last five steps, mean over the seeds; its ratio is to the first step's.
- `steps_to_half/PRESET`: steps until the mean of five steps exceeds 0.5; the number of steps if it never does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import harness
import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentrl.configs.presets import PRESETS
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import PROMPT_VERSION, TrajectoryTokens
from agentrl.trainer.distributed import World, full, join_world
from agentrl.trainer.models.run_models import make_models
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import update_policy

VOCABULARY, PROMPTS, GROUP, ANSWER = 64, 8, 8, 3
LAST = 5
"""Steps whose mean reward is one point of `reward` and `steps_to_half`."""
Curve = list[float]


def main() -> None:
    """Measure, print a table, write JSON and the figure."""
    options = harness.arguments(
        __doc__,
        steps=(int, 40, "optimizer steps of a run"),
        seeds=(int, 3, "runs of each algorithm"),
        lr=(float, 1e-3, "learning rate"),
        presets=(str, "", "some algorithms, separated by commas; all if empty"),
        figure=(str, "", "write the curves here, as PNG or SVG"),
    )
    curves: dict[str, list[Curve]] = {}
    with tempfile.TemporaryDirectory() as folder, join_world() as world:
        model = save_model(Path(folder))
        for preset in options.presets.split(",") if options.presets else PRESETS:
            curves[preset] = [
                play(preset, model, seed, options.steps, options.lr, world) for seed in range(options.seeds)
            ]
            print(
                f"{preset:22} {fmean(c[0] for c in curves[preset]):.2f} -> {fmean(map(ending, curves[preset])):.2f}",
                flush=True,
            )
    report = harness.Report("estimators")
    for preset, runs in curves.items():
        report.add(f"reward_before/{preset}", [c[0] for c in runs], "", statistic=fmean)
        report.add(f"reward/{preset}", [ending(c) for c in runs], "", f"reward_before/{preset}", fmean)
        report.add(f"steps_to_half/{preset}", [float(steps_to_half(c)) for c in runs], "steps", statistic=fmean)
    report.notes["curves"] = {preset: np.mean(runs, 0).round(4).tolist() for preset, runs in curves.items()}
    if options.figure:
        draw(curves, Path(options.figure))
    harness.finish(report, options.out)


def ending(curve: Curve) -> float:
    """Mean reward of the last steps."""
    return fmean(curve[-LAST:])


def steps_to_half(curve: Curve) -> int:
    """The first step that ends LAST steps of a mean reward above one half."""
    return next((i for i in range(LAST, len(curve) + 1) if fmean(curve[i - LAST : i]) > 0.5), len(curve))


def save_model(folder: Path) -> Path:
    """A Llama of three blocks with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def play(preset: str, model: Path, seed: int, steps: int, lr: float, world: World) -> Curve:
    """The mean reward of each step's answers."""
    generator = torch.Generator().manual_seed(seed)
    sampler = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = torch.randint(VOCABULARY, (PROMPTS, 4), generator=torch.Generator().manual_seed(1))
    config = TrainerConfig(algorithm=preset, lr=lr, critic_lr=lr)
    models = make_models(model, config, world)
    optimizer = make_optimizer(models.policy, config)
    curve: Curve = []
    for step in range(steps):
        batch = answers(sampler, prompts, step, generator)
        if config.algorithm.needs_greedy:
            batch = [replace(t, greedy_return=known) for t, known in zip(batch, greedy(sampler, prompts), strict=True)]
        curve.append(fmean(t.episode_return for t in batch))
        share = make_samples(batch, config.algorithm, models, config.token_budget, world)
        update_policy(models.policy, optimizer, share, step, {step: 0}, config, world, models.critic)
        trained = {name: full(p) for name, p in models.policy.lm.named_parameters()}
        sampler.load_state_dict(trained, strict=False)
    return curve


@torch.no_grad()
def answers(
    model: PreTrainedModel, prompts: torch.Tensor, version: int, generator: torch.Generator
) -> list[TrajectoryTokens]:
    """A group of sampled answers to each prompt, with their rewards."""
    ids = prompts.repeat_interleave(GROUP, 0)
    chosen = []
    for _ in range(ANSWER):
        logprobs = torch.log_softmax(model(input_ids=ids).logits[:, -1], -1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
        chosen.append(logprobs.gather(1, tokens))
        ids = torch.cat([ids, tokens], 1)
    recorded = torch.cat(chosen, 1)
    return [trajectory(i, row, recorded[i].numpy(), version) for i, row in enumerate(ids.numpy())]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: torch.Tensor) -> list[float]:
    """The reward of the greedy answer to each answer's prompt."""
    ids = prompts
    for _ in range(ANSWER):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return [reward_of(row[-ANSWER:].tolist()) for row in ids for _ in range(GROUP)]


def reward_of(answer: list[int]) -> float:
    """1 if two of the tokens are multiples of three, else 0."""
    return float(sum(token % 3 == 0 for token in answer) >= 2)


def trajectory(index: int, ids: np.ndarray, logprobs: np.ndarray, version: int) -> TrajectoryTokens:
    """One answer as a batch has it."""
    sampled = np.arange(len(ids)) >= len(ids) - ANSWER
    right = [float(token % 3 == 0) for token in ids[-ANSWER:]]
    reward = reward_of(ids[-ANSWER:].tolist())
    name = f"a{index}"
    found = np.zeros(len(ids), np.float32)
    found[sampled] = logprobs
    return TrajectoryTokens(
        trajectory_id=name,
        session_id=name,
        episode_id=name,
        group_id=f"g{index // GROUP}",
        input_ids=ids.astype(np.int32),
        loss_mask=sampled,
        logprobs=found,
        versions=np.where(sampled, version, PROMPT_VERSION).astype(np.int32),
        turn_ids=np.where(sampled, 0, -1).astype(np.int32),
        temperatures=np.ones(len(ids), np.float32),
        turn_returns=np.array([reward], np.float64),
        episode_return=reward,
        named_returns={"two": reward, "first": right[0], "last": right[-1]},
        calls=(name,),
        prompts=(f"p{index // GROUP}",),
    )


def draw(curves: Mapping[str, list[Curve]], path: Path) -> None:
    """One small picture for each algorithm: the mean over the seeds, and the range."""
    columns = 5
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(2.2 * columns, 1.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for index, axis in enumerate(axes.flat):
        axis.set_visible(index < len(curves))
        axis.tick_params(labelsize=7, labelbottom=index + columns >= len(curves))
    for axis, (preset, runs) in zip(axes.flat, curves.items(), strict=False):
        steps, values = np.arange(1, len(runs[0]) + 1), np.array(runs)
        axis.fill_between(steps, values.min(0), values.max(0), color="#2f6fde", alpha=0.2, linewidth=0)
        axis.plot(steps, values.mean(0), color="#2f6fde", linewidth=1.4)
        axis.set_title(preset, fontsize=9)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

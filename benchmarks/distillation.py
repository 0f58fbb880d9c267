"""Compares distillation from a teacher with rewards alone: the tokens that a student samples until it is as good.

    python benchmarks/distillation.py --out benchmarks/results/distillation.json --figure docs/assets/distillation.png
    python benchmarks/distillation.py --config agents/demo.yaml --noise 0.1 --minibatches 4 --steps 16 \\
        --taught-steps 6 --ways reward,full --tasks 32 --every 1

All runs are `agentrl train CONFIG` on the real engine. The teacher is what the configuration makes with another seed,
or the run in the folder --teacher. The student is the base model, with normal noise of --noise times the deviation of
each tensor added to it. It learns from rewards (`reward`), or from the teacher alone (`sampled`, `full`), with the same
learning rate, batches and minibatches.

- `held_out/teacher`: held-out reward of the teacher at temperature 1. `held_out/WAY`: of the student after its steps.
- `tokens/WAY`: loss tokens until an evaluation (every --every steps) reaches 95 % of the teacher's reward; all tokens
  of the run if none does. The ratio is to `tokens/reward`. `reached/WAY`: the share of the students that reached it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import harness
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from whole_runs import agentrl, published_steps, sampled_evaluations

from agentrl.configs.config_files import load_config
from agentrl.models import resolve_model

ROOT = Path(__file__).parents[1]
TAUGHT = ["trainer.algorithm.reward_weight=0", "trainer.algorithm.distill_coef=1"]
WAYS: dict[str, list[str]] = {
    "reward": [],
    "sampled": [*TAUGHT, "trainer.algorithm.distill=sampled"],
    "full": [*TAUGHT, "trainer.algorithm.distill=full"],
}
ENOUGH = 0.95
"""Share of the teacher's reward that a student must reach."""
TEACHER = ["seed=1000"]


@dataclass(frozen=True, slots=True)
class Student:
    """A student's held-out rewards, and the loss tokens before each of these evaluations."""

    tokens: list[float]
    rewards: list[float]

    def tokens_to(self, reward: float) -> float:
        """The loss tokens before the first evaluation that reaches a reward; all tokens if none does."""
        return next((n for n, found in zip(self.tokens, self.rewards, strict=True) if found >= reward), self.tokens[-1])


def main() -> None:
    """Measure, print a table, write JSON and the figure."""
    options = harness.arguments(
        __doc__,
        config=(Path, ROOT / "agentrl" / "agents" / "demo-quick.yaml", "the run"),
        seeds=(int, 3, "students of each way"),
        first=(int, 0, "the first student's seed"),
        noise=(float, 0.0, "noise on the student's weights, in deviations of each tensor"),
        every=(int, 3, "steps between two evaluations"),
        tasks=(int, 64, "held-out tasks of an evaluation"),
        minibatches=(int, 1, "optimizer steps for each batch"),
        steps=(int, 0, "steps of a student that learns from rewards; 0: the configuration's"),
        taught_steps=(int, 0, "steps of a student that learns from the teacher; 0: as many"),
        ways=(str, ",".join(WAYS), "how students learn, in order"),
        teacher=(str, "", "the folder of a finished run that made the teacher"),
        figure=(str, "", "write the curves here, as PNG or SVG"),
    )
    config = load_config(options.config)
    base, steps = resolve_model(config.model), options.steps or config.steps
    found: dict[str, list[Student]] = {way: [] for way in options.ways.split(",")}
    with tempfile.TemporaryDirectory(prefix="agentrl-distillation-") as name:
        folder = Path(name)
        teacher = Path(options.teacher) if options.teacher else trained(folder / "teacher", options.config, TEACHER)
        known = evaluated(teacher).rewards[-1]
        print(f"teacher: {known:.3f}", flush=True)
        for seed in range(options.first, options.first + options.seeds):
            student = perturbed(base, folder / f"student-{seed}", options.noise, seed)
            shared = [f"model={student}", f"seed={seed}", f"evaluation.every={options.every}"]
            shared += [f"evaluation.size={options.tasks}", "evaluation.hold=true"]
            shared += [f"trainer.minibatches={options.minibatches}"]
            for way in found:
                own = [*WAYS[way], f"steps={steps}"]
                if WAYS[way]:
                    own = [*WAYS[way], f"trainer.teacher={teacher / 'model'}", f"steps={options.taught_steps or steps}"]
                run = trained(folder / f"{way}-{seed}", options.config, [*shared, *own])
                one = evaluated(run)
                found[way].append(one)
                curve = ", ".join(f"{n:.0f} {reward:.3f}" for n, reward in zip(one.tokens, one.rewards, strict=True))
                print(f"seed {seed} {way}: tokens and held-out rewards {curve}", flush=True)
    report = summed(found, known)
    report.notes |= {"config": options.config.name}
    report.notes |= {name: getattr(options, name) for name in ("noise", "minibatches", "every", "tasks")}
    if options.figure:
        draw(found, known, Path(options.figure))
    harness.finish(report, options.out)


def summed(found: Mapping[str, list[Student]], known: float) -> harness.Report:
    """The figures of students by how they learned, beside a teacher of the held-out reward `known`."""
    report = harness.Report("distillation")
    report.add("held_out/teacher", [known], "")
    for way, students in found.items():
        report.add(f"held_out/{way}", [one.rewards[-1] for one in students], "")
        report.add(f"reached/{way}", [float(max(one.rewards) >= ENOUGH * known) for one in students], "")
    tokens = {way: [one.tokens_to(ENOUGH * known) for one in of_way] for way, of_way in found.items()}
    report.compare("tokens", tokens, "", "reward")
    report.notes["curves"] = {way: [[one.tokens, one.rewards] for one in students] for way, students in found.items()}
    return report


def trained(folder: Path, config: Path, overrides: list[str]) -> Path:
    """The folder of a finished run. Raises SystemExit with the end of its log when it fails."""
    folder.mkdir()
    agentrl(folder, folder / "train.log", "train", str(config.resolve()), *overrides)
    (run,) = (folder / "runs").iterdir()
    return run


def evaluated(run: Path) -> Student:
    """The evaluations of a finished run at temperature 1."""
    before = [0.0, *accumulate(metrics["tokens_trained"] for metrics in published_steps(run).values())]
    every = sampled_evaluations(run)
    return Student([before[step] for step, _ in every], [found["reward"] for _, found in every])


def perturbed(base: Path, folder: Path, noise: float, seed: int) -> Path:
    """A copy of a model folder whose weights are worse."""
    shutil.copytree(base, folder)
    generator = torch.Generator().manual_seed(seed)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if noise and tensor.ndim > 1:
                wide = tensor.float()
                tensors[name] = (wide + noise * wide.std() * torch.randn(wide.shape, generator=generator)).to(
                    tensor.dtype
                )
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def draw(found: Mapping[str, list[Student]], teacher: float, path: Path) -> None:
    """Draw the held-out reward by the tokens that were trained on."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(teacher, color="#888888", linewidth=1, linestyle="--", label="teacher")
    for color, (way, students) in zip(("#d1495b", "#edae49", "#2f6fde"), found.items(), strict=False):
        for index, one in enumerate(students):
            axes.plot(one.tokens, one.rewards, color=color, alpha=0.8, label=way if index == 0 else None)
    axes.set(xlabel="loss tokens", ylabel="held-out reward", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

"""Trains a policy by a reward model that was trained from its own answers, and watches the true reward.

    python benchmarks/overoptimisation.py --out benchmarks/results/overoptimisation.json \
        --figure docs/assets/overoptimisation.png
    python benchmarks/overoptimisation.py --seeds 1 --recorded 2 --steps 4 --every 2

Everything is agentrl on the real engine. Each seed is three runs that begin with the same model:

    train         --recorded steps by the true reward ──► recorded groups of answers
    reward-model  in each group, answers of a higher true reward against those of a lower one ──► a reward model
    train         --steps by the reward model's score alone; the true reward has weight 0: it is shown, not trained

--config is a run whose `reward` is one function, the true reward; the quick demo gets `vowels:distinct_vowels`. With
more steps the modelled reward goes on rising, and the true one follows as far as the reward model is right (Gao et al.,
"Scaling Laws for Reward Model Overoptimization", 2023).

- `accuracy`: share of held-out pairs that the reward model orders right.
- `modelled/before`, `modelled/after`, `true/before`, `true/after`: held-out rewards at temperature 1, before the first
  step and after the last. `true/best`: the highest of all evaluations, and `steps/best` its step.
- `kl`: KL divergence from the first model at the last step, in nats per token.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from whole_runs import Json, agentrl, published_steps, sampled_evaluations

HERE = Path(__file__).parent
ROOT = HERE.parent
QUICK = {
    "agent": "single_turn",
    "agent_args": {"template": "{words[0]}", "max_tokens": 6},
    "reward": "vowels:distinct_vowels",
}
"""The quick demo as a run whose reward is a function. While few answers have a vowel twice, the number of vowels, which
is easier to learn, orders nearly all pairs of answers as the true reward does.
"""
PAIRS = {"pairs_per_group": 4, "held_out": 128}
MEASURED = 1e-9
"""Weight of the divergence from the first model: too small to change anything, so it is only measured."""
TRUE, MODELLED = "true", "modelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """A seed's run by the reward model: held-out rewards, and the divergence, by step."""

    accuracy: float
    steps: list[int]
    true: list[float]
    modelled: list[float]
    kl: list[float]  # at each evaluation: of the step before it; 0 before the first
    wall_s: float  # of all three runs

    @property
    def best(self) -> int:
        """The index of the evaluation with the highest true reward."""
        return max(range(len(self.true)), key=self.true.__getitem__)


def main() -> None:
    """Measure, print a table, write JSON and the figure."""
    options = harness.arguments(
        __doc__,
        config=(Path, ROOT / "agentrl" / "agents" / "demo-quick.yaml", "a run whose reward is one function"),
        seeds=(int, 3, "repetitions of all three runs"),
        recorded=(int, 12, "steps by the true reward, whose answers are compared"),
        epochs=(int, 6, "passes of the reward model over the pairs"),
        lr=(float, 3e-4, "learning rate of the reward model"),
        steps=(int, 40, "steps by the reward model"),
        policy_lr=(float, 3e-4, "learning rate of the policy in these steps"),
        every=(int, 4, "steps between two evaluations"),
        figure=(str, "", "write the curves here, as PNG or SVG"),
    )
    base: Json = yaml.safe_load(options.config.read_text())
    base = base if "reward" in base else base | QUICK
    courses: list[Course] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-overoptimisation-") as name:
        for seed in range(options.seeds):
            folder = Path(name) / f"seed-{seed}"
            one = play(folder, base, seed, options)
            courses.append(one)
            print(
                f"seed {seed}: accuracy {one.accuracy:.2f}, modelled {one.modelled[0]:.2f} -> {one.modelled[-1]:.2f}, "
                f"true {one.true[0]:.3f} -> {one.true[-1]:.3f} (best {one.true[one.best]:.3f} after step "
                f"{one.steps[one.best]}), KL {one.kl[-1]:.3f}, {one.wall_s:.0f} s",
                flush=True,
            )
    report = harness.Report("overoptimisation", notes={"config": options.config.name})
    report.add("accuracy", [one.accuracy for one in courses], "")
    for kind in (MODELLED, TRUE):
        report.add(f"{kind}/before", [getattr(one, kind)[0] for one in courses], "")
        report.add(f"{kind}/after", [getattr(one, kind)[-1] for one in courses], "")
    report.add(f"{TRUE}/best", [one.true[one.best] for one in courses], "")
    report.add("steps/best", [float(one.steps[one.best]) for one in courses], "steps")
    report.add("kl", [one.kl[-1] for one in courses], "nats")
    report.notes["curves"] = [
        {"steps": one.steps, TRUE: one.true, MODELLED: one.modelled, "kl": one.kl, "wall_s": round(one.wall_s)}
        for one in courses
    ]
    if options.figure:
        draw(courses, Path(options.figure))
    harness.finish(report, options.out)


def play(folder: Path, base: Json, seed: int, options: Any) -> Course:
    """The three runs of one seed."""
    began = time.monotonic()
    folder.mkdir()
    given = base | {"seed": seed, "name": "recorded", "steps": options.recorded}
    command(folder, "train", given | {"evaluation": {}})
    pairs = {
        "name": "preferences",
        "model": base["model"],
        "seed": seed,
        "epochs": options.epochs,
        "data": PAIRS | {"run": "runs/recorded"},
        "trainer": {"lr": options.lr},
    }
    command(folder, "reward-model", pairs)
    components = {
        MODELLED: {"function": "reward_model", "args": {"model": "runs/preferences/model"}},
        TRUE: {"function": base["reward"], "weight": 0},
    }
    trainer = base.get("trainer", {})
    algorithm = trainer.get("algorithm", {})
    algorithm = {"preset": algorithm} if isinstance(algorithm, str) else algorithm
    learning = given | {
        "name": "modelled",
        "steps": options.steps,
        "reward": {"components": components},
        "trainer": trainer | {"lr": options.policy_lr, "algorithm": algorithm | {"kl_coef": MEASURED}},
        "evaluation": base.get("evaluation", {}) | {"every": options.every},
    }
    command(folder, "train", learning)
    return course(folder / "runs", time.monotonic() - began)


def command(folder: Path, name: str, config: Json) -> None:
    """Run `agentrl NAME` with a configuration. Raises SystemExit with the end of its log when it fails."""
    file = folder / f"{config['name']}.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    agentrl(folder, file.with_suffix(".log"), name, file.name, modules=HERE)


def course(runs: Path, wall_s: float) -> Course:
    """The results of the runs in a folder."""
    lines = (runs / "preferences" / "metrics.jsonl").read_text().splitlines()
    accuracy = [one["held_out/accuracy"] for one in map(json.loads, lines) if "held_out/accuracy" in one][-1]
    kl = {0: 0.0} | {step: metrics["kl_reference"] for step, metrics in published_steps(runs / "modelled").items()}
    found = sampled_evaluations(runs / "modelled")
    return Course(
        accuracy=accuracy,
        steps=[step for step, _ in found],
        true=[setting["stats"][f"reward/{TRUE}"] for _, setting in found],
        modelled=[setting["reward"] for _, setting in found],
        kl=[kl[step] for step, _ in found],
        wall_s=wall_s,
    )


def draw(courses: Sequence[Course], path: Path) -> None:
    """Draw both held-out rewards by step and by divergence."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_step, by_kl = figure.subplots(1, 2)
    curves = _draw_in(by_step, courses, "steps", "step")
    _draw_in(by_kl, courses, "kl", "KL divergence from the first model, nats per token")
    figure.legend(curves, ["true (left scale)", "modelled (right scale)"], loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=150)


def _draw_in(axes: Axes, courses: Sequence[Course], by: str, label: str) -> list[Line2D]:
    """Draw all seeds; returns the curves of the last one."""
    other, curves = axes.twinx(), list[Line2D]()
    for one in courses:
        (true,) = axes.plot(getattr(one, by), one.true, color="#2f6fde", alpha=0.8)
        (modelled,) = other.plot(getattr(one, by), one.modelled, color="#d1495b", alpha=0.8, linestyle="--")
        curves = [true, modelled]
    axes.set(xlabel=label, ylabel="true held-out reward", ylim=(0, None))
    other.set_ylabel("modelled held-out reward")
    axes.grid(alpha=0.3)
    return curves


if __name__ == "__main__":
    main()

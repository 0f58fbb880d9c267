"""The loop of SFT, DPO and reward models.

    base model ─► (DPO: reference log-probabilities of all pairs) ─► newest checkpoint loaded, if there is one
        │
        │  ┌───────────────────────────────────────────────────────────────────────────────────────┐
        └──┼─► step k: its items ─► update ─► metrics line ─► when due: held-out scores, checkpoint  │
           └─────────────────────────────────── next step ◄────────────────────────────────────────┘
    last step ─► model/: a whole Hugging Face folder; adapter/: the adapter, if one was trained

The loop waits for no other process. SIGINT and SIGTERM never interrupt a step: it is finished and checkpointed first.

`runs/NAME/` holds config.yaml, trainer.json (what `auto` means here), metrics.jsonl (one object per step; step
0 is before the first update), checkpoints/ and model/. A line of metrics may be ahead of the newest checkpoint. A start
deletes such lines, since it repeats their steps.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl import visible
from agentrl.configs.tuning_config import AnyConfig
from agentrl.domain.schemas import TrainedBatch
from agentrl.errors import UserError
from agentrl.files import atomic_file, remove_drafts
from agentrl.trainer.checkpoints import (
    checkpoint_folders,
    checkpoint_reader,
    checkpoint_retention,
    checkpoint_writer,
)
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS, Checkpoint, StepRecord
from agentrl.trainer.distributed import World
from agentrl.trainer.learning_rate import policy_rate
from agentrl.trainer.models.policy import Body
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.run.trainer_start import facts_of, resolved
from agentrl.trainer.stop import Stop
from agentrl.trainer.tuning.items import Data, Item
from agentrl.trainer.tuning.methods import Dpo, Method, method_of
from agentrl.trainer.tuning.step import score, train, with_reference
from agentrl.trainer_facts import line as line_of

STARTED = "trainer.json"
"""The file of what the newest start was recorded with."""
HELD_OUT = "held_out/"
"""Prefix of the metrics of held-out items."""
Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(slots=True)
class Tuning:
    """The loop's state on one rank."""

    config: AnyConfig
    base_model: Path
    world: World
    method: Method
    model: Body
    optimizer: torch.optim.Optimizer
    data: Data
    digest: str
    steps: int
    step: int = 0

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.config.run_dir / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        """The file of metrics, one JSON object per line."""
        return self.config.run_dir / "metrics.jsonl"


def tune(
    config: AnyConfig, base_model: Path, data: Data, world: World, stop: Stop, progress: Progress = lambda *_: None
) -> bool:
    """Train all steps (true), or stop after the current one (false). Collective; every rank has the same data.

    Raises UserError when the folder's checkpoint was made from other data.
    """
    torch.manual_seed(config.seed)
    config = started(config, base_model, world)
    method = method_of(config)
    model = method.load(base_model, config, world)
    prepared = Data([method.prepared(i) for i in data.train], [method.prepared(i) for i in data.held_out])
    steps = config.steps or config.epochs * steps_per_epoch(data.train, config.trainer.batch_size)
    optimizer = make_optimizer(model, config.trainer)
    t = Tuning(config, base_model, world, method, model, optimizer, prepared, data.digest(), steps)
    if model.unpacked:
        say(t, f"every sequence is computed by itself, which is slower: {model.unpacked}")
    found = find_checkpoint(t)
    if isinstance(method, Dpo):  # while the model is still the base model
        say(t, "computing the base model's log-probabilities")
        t.data = Data(reference_of(t, prepared.train), reference_of(t, prepared.held_out))
    if found:
        checkpoint_reader.load(found, model, optimizer, world)
        t.step = found.record.step
        say(t, f"resuming after step {t.step}")
    drop_repeated_lines(t)
    if not t.step and t.data.held_out:
        write(t, {"step": 0} | held_out(t))
    while t.step < t.steps:
        stopping = one_step(t, stop)
        progress(t.step, t.steps)
        if stopping and t.step < t.steps:
            say(t, f"stopped after step {t.step} of {t.steps}: the same command continues")
            return False
    method.export(config.run_dir, model, base_model, config.trainer.lora, world)
    say(t, f"finished: {t.step} steps, model in {config.run_dir / 'model'}")
    return True


def started(config: AnyConfig, base_model: Path, world: World) -> AnyConfig:
    """The configuration without `auto`. The run's folder keeps the values; the compute type stays. Collective."""
    file = config.run_dir / STARTED
    began_with = world.from_leader(lambda: json.loads(file.read_text())["dtype"] if file.is_file() else None)
    trainer = resolved(config.trainer, base_model, world, began_with)
    if world.leads:
        facts = facts_of(trainer, world)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as draft:
            draft.write_text(json.dumps(facts))
        visible.say(line_of(facts))
    return config.model_copy(update={"trainer": trainer})


def find_checkpoint(t: Tuning) -> Checkpoint | None:
    """The checkpoint to resume from, on every rank. Sets unusable newer ones aside. Collective."""
    found: Checkpoint | None = None
    if t.world.leads:
        remove_drafts(t.checkpoints)
        check = checkpoint_folders.verify if t.config.trainer.verify_checkpoint else lambda _: None
        found, ignored = checkpoint_folders.newest(t.checkpoints, check=check)
        for unusable in ignored:
            aside = checkpoint_folders.set_aside(unusable)
            say(t, f"ignoring checkpoint {unusable.folder}: {unusable.why} (set aside as {aside.name})")
    found = t.world.share(found)
    if found and found.record.batch.digest != t.digest:
        raise UserError(
            f"data: {found.folder} was made from other data, or with another held_out: give another name, or restore "
            "the data to resume it"
        )
    if found and found.record.step > t.steps:
        raise UserError(f"steps: {t.config.run_dir} has {found.record.step} already, more than {t.steps}")
    return found


def reference_of(t: Tuning, items: Sequence[Item]) -> list[Item]:
    """Items with the base model's log-probabilities."""
    return with_reference(t.model, items, t.method, t.config.trainer, t.world)


def one_step(t: Tuning, stop: Stop) -> bool:
    """Train one step and write its metrics; score held-out items and write a checkpoint when due. Whether to stop."""
    start, number = time.monotonic(), t.step + 1
    trainer = t.config.trainer
    items = batch_of(t.data.train, number, trainer.batch_size, t.config.seed)
    lr = policy_rate(number, t.steps, trainer)
    metrics = train(t.model, t.optimizer, items, t.method, lr, trainer, t.world)
    per_epoch = steps_per_epoch(t.data.train, trainer.batch_size)
    metrics |= {"epoch": number / per_epoch, "time/train": time.monotonic() - start}
    t.step = number
    due = number % trainer.checkpoint_every == 0 or number == t.steps
    stopping: bool = t.world.share(stop.is_set())  # read once, so that a run that stops has a checkpoint
    if t.data.held_out and (due or stopping):
        metrics |= held_out(t)
    write(t, {"step": number} | metrics)
    if due or stopping:
        save(t, metrics)
    say(t, line(t, metrics))
    return stopping


def batch_of(items: Sequence[Item], step: int, size: int, seed: int) -> list[Item]:
    """The items of a step, counted from 1. Each epoch has a new order of all items."""
    epoch, k = divmod(step - 1, steps_per_epoch(items, size))
    order = list(range(len(items)))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return [items[i] for i in order[k * size : (k + 1) * size]]


def steps_per_epoch(items: Sequence[Item], size: int) -> int:
    """Steps per epoch; the last step of an epoch may have fewer items."""
    return math.ceil(len(items) / size)


def held_out(t: Tuning) -> dict[str, float]:
    """Metrics of the held-out items, with the prefix HELD_OUT. Collective."""
    found = score(t.model, t.data.held_out, t.method, t.config.trainer, t.world)
    return {f"{HELD_OUT}{name}": value for name, value in found.items() if not name.startswith("tokens_")}


def save(t: Tuning, metrics: dict[str, float]) -> None:
    """Write a durable checkpoint and delete older ones. Collective."""
    facts = TrainedBatch(
        step_id=t.config.method, digest=t.digest, estimator=t.config.method, wasted_tokens=0, trained=[]
    )
    record = StepRecord(step=t.step, version=t.step, batch=facts, metrics=metrics)
    parts = checkpoint_writer.state_of("policy", t.model, t.optimizer)
    made = checkpoint_writer.begin(t.checkpoints, record, parts, t.world, copied=False).finish()
    if t.world.leads:
        checkpoint_retention.remove_older(made, t.config.trainer)


def drop_repeated_lines(t: Tuning) -> None:
    """Delete the lines of metrics of steps that will be repeated."""
    if t.world.leads:
        lines = t.metrics.read_text().splitlines(keepends=True) if t.metrics.is_file() else []
        kept = [text for text in lines if text.endswith("\n") and json.loads(text)["step"] <= t.step]
        t.metrics.parent.mkdir(parents=True, exist_ok=True)
        t.metrics.write_text("".join(kept) if t.step else "")


def write(t: Tuning, metrics: dict[str, float]) -> None:
    """Append a line of metrics."""
    if t.world.leads:
        with t.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")


def line(t: Tuning, metrics: dict[str, float]) -> str:
    """One step as a line for the terminal."""
    names = [f"{where}{name}" for where in ("", HELD_OUT) for name in ("loss", "entropy", "accuracy", "margin")]
    parts = [f"{name} {metrics[name]:.4f}" for name in names if name in metrics]
    end = f"grad {metrics['grad_norm']:.2f}  {metrics['tokens_trained']:.0f} tokens  {metrics['time/train']:.1f}s"
    return "  ".join([f"step {t.step}/{t.steps}", *parts, end])


def say(t: Tuning, text: str) -> None:
    """Print on rank 0."""
    if t.world.leads:
        visible.say(text)

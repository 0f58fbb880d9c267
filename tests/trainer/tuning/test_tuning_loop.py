"""A run of SFT, DPO or a reward model: its files, what stops it, what resumes it, what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import read_part
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from tuning_setup import config_of, prepared, random_items

from agentrl.configs.tuning_config import AnyConfig
from agentrl.errors import UserError
from agentrl.trainer.checkpoints import checkpoint, checkpoint_folders, checkpoint_reader
from agentrl.trainer.distributed import World
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.stop import Stop
from agentrl.trainer.tuning import step
from agentrl.trainer.tuning.items import Data, split
from agentrl.trainer.tuning.tuning_loop import batch_of, tune

KINDS = ("sft", "dpo", "reward-model")


def data(kind: str, seed: int = 0) -> Data:
    return split(random_items(kind, 8, seed), 2, 0, [])


def config(kind: str, folder: Path, steps: int = 4, **trainer: Any) -> AnyConfig:
    made = config_of(kind, folder, **{"batch_size": 4, "lr": 1e-3, "checkpoint_every": 2} | trainer)
    return made.model_copy(update={"steps": steps})


def lines(folder: Path) -> list[dict[str, float]]:
    text = (folder / "test" / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k != "time/train"} for line in text.splitlines()]


@pytest.mark.parametrize(("kind", "rank"), [*((kind, 0) for kind in KINDS), ("dpo", 4)])
def test_a_stopped_run_resumes_with_the_same_result(
    kind: str, rank: int, tiny_model: Path, world: World, tmp_path: Path
) -> None:
    straight, halting, stop = tmp_path / "straight", tmp_path / "halting", Stop()
    lora = {"rank": rank}
    assert tune(config(kind, straight, lora=lora), tiny_model, data(kind), world, stop)

    def interrupt(done: int, _total: int) -> None:
        if done == 1:
            stop.set()

    assert not tune(config(kind, halting, lora=lora), tiny_model, data(kind), world, stop, interrupt)
    assert [line["step"] for line in lines(halting)] == [0, 1, 2]  # the step in hand is finished
    assert not (halting / "test" / "model").exists()
    assert tune(config(kind, halting, lora=lora), tiny_model, data(kind), world, Stop())
    assert lines(halting) == lines(straight)
    one, other = (load_file(folder / "test" / "model" / "model.safetensors") for folder in (straight, halting))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_held_out_items_are_scored_first_and_at_checkpoints(tiny_model: Path, world: World, tmp_path: Path) -> None:
    tune(config("dpo", tmp_path, steps=5), tiny_model, data("dpo"), world, Stop())
    found = lines(tmp_path)
    assert [line["step"] for line in found if "held_out/loss" in line] == [0, 2, 4, 5]
    assert found[0]["held_out/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert {"loss", "accuracy", "margin", "reward_chosen", "grad_norm", "lr", "epoch"} <= found[1].keys()


def test_metric_lines_of_repeated_steps_are_deleted(tiny_model: Path, world: World, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def die(done: int, _total: int) -> None:
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        tune(config("sft", tmp_path), tiny_model, data("sft"), world, Stop(), die)
    with (tmp_path / "test" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # it was writing
    assert tune(config("sft", tmp_path), tiny_model, data("sft"), world, Stop())
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]


def test_old_checkpoints_go_and_a_finished_run_stays_finished(tiny_model: Path, world: World, tmp_path: Path) -> None:
    made = config("sft", tmp_path, checkpoint_every=1)
    tune(made, tiny_model, data("sft"), world, Stop())
    folders = sorted(path.name for path in (tmp_path / "test" / "checkpoints").iterdir())
    assert folders == ["step-000003-sft", "step-000004-sft"]
    before = lines(tmp_path)
    assert tune(made, tiny_model, data("sft"), world, Stop())
    assert lines(tmp_path) == before


def test_a_damaged_checkpoint_is_skipped(tiny_model: Path, world: World, tmp_path: Path) -> None:
    made = config("sft", tmp_path)
    tune(made, tiny_model, data("sft"), world, Stop())
    newest = tmp_path / "test" / "checkpoints" / "step-000004-sft"
    (newest / checkpoint.STATE / ".metadata").write_bytes(b"")
    before = lines(tmp_path)
    assert tune(made, tiny_model, data("sft"), world, Stop())
    assert lines(tmp_path) == before
    assert newest.with_name(f"stray-{newest.name}").exists()


def test_other_data_and_fewer_steps_are_refused(tiny_model: Path, world: World, tmp_path: Path) -> None:
    tune(config("sft", tmp_path), tiny_model, data("sft"), world, Stop())
    with pytest.raises(UserError, match="was made from other data"):
        tune(config("sft", tmp_path), tiny_model, data("sft", seed=1), world, Stop())
    with pytest.raises(UserError, match=r"steps: .* has 4 already, more than 3"):
        tune(config("sft", tmp_path, steps=3), tiny_model, data("sft"), world, Stop())


def test_transformers_loads_the_exported_model(tiny_model: Path, world: World, tmp_path: Path) -> None:
    tune(config("sft", tmp_path), tiny_model, data("sft"), world, Stop())
    trained = read_part(tmp_path / "test" / "checkpoints" / "step-000004-sft", "policy", world)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "test" / "model")
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())


@pytest.mark.parametrize("train_layers", [None, 1])
def test_transformers_loads_the_reward_model_as_a_classifier(
    tiny_model: Path, world: World, tmp_path: Path, train_layers: int | None
) -> None:
    made = config("reward-model", tmp_path, train_layers=train_layers)
    tune(made, tiny_model, data("reward-model"), world, Stop())
    folder = tmp_path / "test" / "model"
    described = json.loads((folder / "config.json").read_text())
    assert described["architectures"] == ["Qwen2ForSequenceClassification"]
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert tensors.pop("score.bias").item() == 0
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1
    assert all(torch.equal(p, tensors[name]) for name, p in model.named_parameters())
    method, ours, items = prepared(made, random_items("reward-model", 1, seed=5), tiny_model, world)
    found, _ = checkpoint_folders.newest(tmp_path / "test" / "checkpoints")
    assert found is not None
    checkpoint_reader.load(found, ours, make_optimizer(ours, made.trainer), world)
    score = step.score(ours, items, method, made.trainer, world)
    with torch.no_grad():
        ids = [torch.from_numpy(s.tokens.input_ids[:-1]).long() for s in items[0]]
        plain = [model(input_ids=one[None]).logits.item() for one in ids]
    assert score["reward_chosen"] == pytest.approx(plain[0], abs=1e-5)
    assert score["reward_rejected"] == pytest.approx(plain[1], abs=1e-5)


@pytest.mark.parametrize("kind", ["sft", "reward-model"])
def test_an_adapter_is_exported_merged_and_by_itself(kind: str, tiny_model: Path, world: World, tmp_path: Path) -> None:
    tune(config(kind, tmp_path, lora={"rank": 4}, lr=1e-2), tiny_model, data(kind), world, Stop())
    settings: dict[str, Any] = {"dtype": torch.float32} | ({"num_labels": 1} if kind == "reward-model" else {})
    loader = AutoModelForCausalLM if kind == "sft" else AutoModelForSequenceClassification
    merged, base = (loader.from_pretrained(f, **settings) for f in (tmp_path / "test" / "model", tiny_model))
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "test" / "adapter")).merge_and_unload()
    found = dict(adapted.named_parameters())
    changed = set()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-6, msg=name)
        changed |= {name.rpartition(".")[0].rpartition(".")[2]} if not torch.equal(parameter, before[name]) else set()
    layers = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert changed == (layers if kind == "sft" else layers | {"score"})


def test_each_epoch_has_every_item_once_in_a_new_order() -> None:
    items = random_items("sft", 10)
    names = {item[0].tokens.trajectory_id for item in items}
    epochs = [
        [item[0].tokens.trajectory_id for k in range(first, first + 4) for item in batch_of(items, k, 3, 7)]
        for first in (1, 5)
    ]
    assert all(set(epoch) == names and len(epoch) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [len(batch_of(items, k, 3, 7)) for k in range(1, 5)] == [3, 3, 3, 1]


def test_held_out_items_are_not_trained_and_some_must_remain() -> None:
    items = random_items("sft", 5)
    made = split(items, 2, 0, [])
    assert (len(made.train), len(made.held_out)) == (3, 2)
    with pytest.raises(UserError, match=r"data: 5 items \(left out 3\), of which held_out takes 5: none are left"):
        split(items, 5, 0, ["left out 3"])

"""SFT by the forward KL divergence from the distributions that a run has recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from history import History
from plain import load_plain
from pydantic import ValidationError
from support import VOCABULARY, random_samples
from test_step import distance
from torch import Tensor
from tuning_setup import config_of, random_items

from agentrl.configs.config_files import validated
from agentrl.configs.tuning_config import SftConfig, SftDataConfig
from agentrl.errors import ModelFolderError, UserError
from agentrl.models import resolve_model, tiny
from agentrl.store import Database
from agentrl.store.exports import likeliest_tokens
from agentrl.trainer.distributed import World, full
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Likeliest
from agentrl.trainer.stop import Stop
from agentrl.trainer.tuning import recorded, step
from agentrl.trainer.tuning.items import Data, Item, imitated
from agentrl.trainer.tuning.methods import Sft
from agentrl.trainer.tuning.source import load_data
from agentrl.trainer.tuning.tuning_loop import tune


def sft(**changes: Any) -> SftConfig:
    return validated({"name": "n", "model": "tiny", "data": {"run": "test"}, "loss": "forward_kl"} | changes, SftConfig)


def items_with_distributions() -> list[Item]:
    """Groups of conversations at two temperatures, with rows of different lengths. Some turns have no recorded
    distribution, and one conversation has none at all.
    """
    rng, items = np.random.default_rng(0), []
    for n, sample in enumerate(random_samples()):
        t, width = sample.tokens, 3 + n % 2
        logits = rng.normal(0, 2, (t.length, VOCABULARY)).astype(np.float32)
        log_q = torch.log_softmax(torch.from_numpy(logits), -1).topk(width)
        here = (t.turn_ids == 0) | (n % 3 == 0)
        ids = np.where(here[:, None], log_q.indices.numpy(), -1).astype(np.int32)
        ids[::5, width - 1] = -1
        found = Likeliest(ids, log_q.values.numpy(), t.temperatures)
        items.append([imitated(t, None if n == 4 else found)])
    return items


def plain_loss(lm: Any, items: list[Item]) -> tuple[Tensor, int, int]:
    """The sum over tokens, how many there are, and how many have a distribution."""
    total, tokens, compared = torch.zeros((), dtype=torch.float64), 0, 0
    for (sample,) in items:
        t, known = sample.tokens, sample.likeliest
        logits = lm(input_ids=torch.from_numpy(t.input_ids).long()[None]).logits[0]
        for at in np.flatnonzero(t.loss_mask).tolist():
            tokens += 1
            row = [] if known is None else [k for k, i in enumerate(known.ids[at]) if i >= 0]
            if not row or known is None:
                total = total - torch.log_softmax(logits[at - 1], -1)[int(t.input_ids[at])]
                continue
            compared += 1
            p = torch.softmax(logits[at - 1] / float(known.temperatures[at]), -1)
            q = torch.from_numpy(known.logprobs[at, row]).double().exp()
            p_known = p[torch.from_numpy(known.ids[at, row]).long()]
            rest = 1 - q.sum()
            total = total + (q * (q / p_known).log()).sum() + rest * (rest / (1 - p_known.sum())).log()
    return total, tokens, compared


@pytest.mark.parametrize("budget", [24, 4096])
def test_loss_and_gradients_equal_those_of_separate_sequences(tiny_model: Path, world: World, budget: int) -> None:
    items, config = items_with_distributions(), sft(trainer={"tokens_per_microbatch": budget, "grad_clip": 1e9})
    method = Sft(compares=True)
    model = method.load(tiny_model, config, world)
    optimizer, found = make_optimizer(model, config.trainer), dict[str, Tensor]()
    optimizer.register_step_pre_hook(lambda *_: found.update({n: full(p.grad).clone() for n, p in model.trainable()}))
    metrics = step.train(model, optimizer, items, method, 1e-3, config.trainer, world)
    lm = load_plain(tiny_model)
    total, tokens, compared = plain_loss(lm, items)
    (total / tokens).backward()
    assert metrics["loss"] == pytest.approx(total.item() / tokens, rel=1e-5)
    assert metrics["with_distribution"] == pytest.approx(compared / tokens)
    assert 0 < compared < tokens
    assert distance(found, {name: p.grad.float() for name, p in lm.named_parameters()}) < 1e-5


def test_cross_entropy_is_unchanged_by_samples_without_distributions(tiny_model: Path, world: World) -> None:
    items, losses = random_items("sft"), []
    for method in (Sft(), Sft(compares=True)):
        config = config_of("sft")
        model = method.load(tiny_model, config, world)
        found = step.train(model, make_optimizer(model, config.trainer), items, method, 1e-3, config.trainer, world)
        losses.append((found["loss"], found.get("with_distribution")))
    assert losses[0] == (losses[1][0], None)
    assert losses[1][1] == 0


def test_distributions_are_at_the_places_of_their_calls(database_url: str) -> None:
    database = Database(database_url)
    try:
        history = History(database, seed=1, likeliest=3)
        history.train(1)
        found = recorded.read(database, SftDataConfig(run="test"))
        known = recorded.distributions(database, found)
        assert known.keys() == {t.trajectory_id for t in found}
        for t in found:
            one = known[t.trajectory_id]
            sampled = t.turn_ids >= 0
            assert one.ids.shape == one.logprobs.shape == (t.length, 3)
            assert (one.ids[~sampled] == -1).all()
            np.testing.assert_array_equal(one.ids[sampled], t.input_ids[sampled, None] + np.arange(3))
            np.testing.assert_allclose(one.logprobs[sampled], np.broadcast_to([-0.5, -1.5, -2.5], (sampled.sum(), 3)))
            np.testing.assert_array_equal(one.temperatures, t.temperatures)
        (item, *_) = recorded.conversations(found, SftDataConfig(run="test"), known)
        assert item[0].likeliest is known[item[0].tokens.trajectory_id]
        assert set(item[0].tokens.temperatures) == {1}
        assert Data([item], []).digest() != Data([[replace(item[0], likeliest=None)]], []).digest()
        (calls,) = database.query(likeliest_tokens.of_trajectories, [found[0].trajectory_id]).values()
        calls[0]["start"] -= 1
        with pytest.raises(UserError, match="do not fit its outputs"):
            recorded._placed(found[0], calls)
    finally:
        database.close()


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("AGENTRL_DATABASE_URL", raising=False)
    (tmp_path / "test").mkdir()
    return tmp_path


def history_of(runs_dir: Path, model: str, **changes: Any) -> None:
    database = Database(f"sqlite:///{runs_dir}/test/agentrl.db")
    database.upgrade()
    History(database, base_model=model, **changes).train(1)
    database.close()


def test_a_student_comes_nearer_to_recorded_distributions(runs_dir: Path, world: World) -> None:
    model = resolve_model("tiny")
    history_of(runs_dir, str(model), likeliest=3)
    config = sft(runs_dir=str(runs_dir), steps=8, trainer={"lr": 1e-3})
    data = load_data(config, model)
    assert tune(config, model, data, world, Stop())
    lines = [json.loads(line) for line in (runs_dir / "n" / "metrics.jsonl").read_text().splitlines()]
    assert {line["with_distribution"] for line in lines} == {1.0}
    assert lines[-1]["loss"] < 0.75 * lines[0]["loss"]


def test_a_run_without_distributions_is_refused_by_name(runs_dir: Path) -> None:
    model = resolve_model("tiny")
    history_of(runs_dir, str(model))
    with pytest.raises(UserError, match=r"run 'test' has recorded no distributions: .* rollout\.top_logprobs"):
        load_data(sft(runs_dir=str(runs_dir)), model)
    assert load_data(sft(runs_dir=str(runs_dir), loss="cross_entropy"), model).train


def test_a_run_of_a_model_with_other_tokens_is_refused_by_name(runs_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = json.loads(tiny.make_tokenizer().to_str())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    history_of(runs_dir, str(other), likeliest=2)
    with pytest.raises(ModelFolderError, match=r"data\.run: .*other has another tokenizer than .*tiny: 'a' has the id"):
        load_data(sft(runs_dir=str(runs_dir)), resolve_model("tiny"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"file": "x.jsonl"}}, "forward_kl needs data.run"),
        ({"resources": {"trainer": {"ranks": 2, "context": 2}}}, "not possible with resources.trainer.context above 1"),
        ({"loss": "reverse_kl"}, "loss"),
    ],
)
def test_what_has_no_distributions_is_refused(changes: Any, message: str) -> None:
    with pytest.raises((ValidationError, UserError), match=message):
        sft(**changes)

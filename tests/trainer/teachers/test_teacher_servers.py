"""Teachers that are servers: asked once for each trajectory, with retries; what they cannot score is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_setup import Setup
from pydantic import ValidationError

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import FACTS
from agentrl.errors import ModelFolderError, UserError
from agentrl.models import tiny
from agentrl.store.training import steps, token_facts
from agentrl.testing import FakeEngine, Reply
from agentrl.trainer.teachers import teacher_servers
from agentrl.trainer.teachers.teacher_servers import address_of


@pytest.fixture
def n_steps() -> int:
    return 2


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_servers, "FIRST_WAIT_S", 0.01)


def taught(engine: FakeEngine, **algorithm: Any) -> dict[str, Any]:
    return {"teacher": engine.url, "algorithm": Algorithm(distill_coef=0.5, **algorithm)}


def table(setup: Setup) -> list[tuple[Any, ...]]:
    return setup.query("SELECT trajectory_id, teacher, tokens, data FROM teacher_logprobs ORDER BY trajectory_id")


def test_a_servers_logprobs_are_the_facts_of_the_tokens_that_it_scored(setup: Setup) -> None:
    with FakeEngine() as engine:
        assert setup.train(**taught(engine))
    compared = 0
    for step in setup.database.query(steps.of_run, setup.run_id):
        batch = setup.database.query(steps.batch, step.id)
        facts = setup.database.query(
            token_facts.of_trajectories, {t.trajectory_id: step.id for t in batch.trajectories}
        )
        for t in batch.trajectories:
            expected = np.array(engine.score(t.input_ids.tolist()), np.float32)[t.loss_mask]
            found = facts[t.trajectory_id].trained
            assert found[FACTS.index("teacher_logprob")].tobytes() == expected.tobytes()
            compared += 1
    asked = [tuple(request["input_ids"]) for request in engine.requests]
    assert len(asked) == len(set(asked)) == len(table(setup)) == compared == 12


def test_a_repeated_step_reads_the_numbers_that_were_kept(
    setup: Setup, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeEngine() as engine:
        with monkeypatch.context() as patch:  # dies after the server was asked, before anything is saved
            patch.setattr("agentrl.trainer.training_run.update_policy", dying)
            with pytest.raises(RuntimeError, match="died"):
                setup.train(**taught(engine))
        kept = table(setup)
        assert len(kept) == len(engine.requests) == 6
        engine.score = lambda ids: [-30.0] * len(ids)  # the server changes its mind
        assert setup.train(**taught(engine))
        assert [row for row in table(setup) if row in kept] == kept
        assert len(engine.requests) == 12
    first, second = setup.step_metrics("kl_teacher")
    assert abs(first) < 12 < second


def dying(*_: object, **__: object) -> None:
    raise RuntimeError("died")


def test_a_server_that_is_busy_is_asked_again(setup: Setup) -> None:
    with FakeEngine() as engine:
        engine.enqueue(Reply(status=503), Reply(status=429), Reply(status=500))
        assert setup.train(**taught(engine))
        assert len(engine.requests) == 15


def test_a_server_that_refuses_or_stays_busy_ends_the_step_with_its_reason(setup: Setup) -> None:
    with FakeEngine() as engine:
        engine.enqueue(Reply(status=400, error="longer than the context"))
        with pytest.raises(
            UserError, match=rf"trainer\.teacher: trajectory \w+: {engine.url}: .*longer than the context"
        ):
            setup.train(**taught(engine))
        assert len(engine.requests) == 1
        engine.enqueue(*[Reply(status=503, error="busy")] * 100)
        with pytest.raises(UserError, match="busy"):
            setup.train(**taught(engine))
        attempts = setup.config.trainer.teacher_server.attempts
        assert len(engine.requests) == 1 + attempts
        assert table(setup) == []


def test_a_server_that_does_not_answer_is_found_at_the_start(setup: Setup) -> None:
    with FakeEngine() as engine:
        settings = taught(engine)
    server = setup.config.trainer.teacher_server.model_copy(update={"attempts": 2})
    with pytest.raises(UserError, match=rf"trainer\.teacher: {settings['teacher']}: .*/model_info failed"):
        setup.train(**settings, teacher_server=server)


def test_tokens_of_another_temperature_are_refused(setup: Setup) -> None:
    with setup.database.write() as conn:
        conn.exec_driver_sql("UPDATE interactions SET temperature = 0.5")
    with FakeEngine() as engine, pytest.raises(UserError, match=r"sampled at temperature 0\.5, and .* 1 only"):
        setup.train(**taught(engine))


def tokenizers(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders whose byte tokens have different ids."""
    folders = tmp_path / "own", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
        tiny.make_tokenizer().save(str(folder / "tokenizer.json"))
    found = json.loads((folders[1] / "tokenizer.json").read_text())
    vocab = found["model"]["vocab"]
    names = [name for name in vocab if len(name) == 1]
    found["model"]["vocab"] = vocab | dict(zip(names, [vocab[n] for n in [*names[1:], names[0]]], strict=True))
    (folders[1] / "tokenizer.json").write_text(json.dumps(found))
    return folders


def test_a_server_with_another_tokenizer_is_refused(setup: Setup, tmp_path: Path, monkeypatch: Any) -> None:
    own, other = tokenizers(tmp_path)
    real = teacher_servers.check_same_texts
    monkeypatch.setattr(teacher_servers, "check_same_texts", lambda _, *rest: real(own, *rest))
    with FakeEngine(model_path=str(other)) as engine:
        monkeypatch.setattr(teacher_servers, "check_same_tokens", lambda *_: None)
        engine.text_of = lambda token: "another"
        with pytest.raises(UserError, match=rf"{engine.url} has another tokenizer .* 'another' there"):
            setup.train(**taught(engine))
        assert len(engine.requests) == 1
        text = tiny.make_tokenizer()
        engine.text_of = lambda token: text.decode([token], skip_special_tokens=False)
        assert setup.train(**taught(engine))
        asked = [request["return_text_in_logprobs"] for request in engine.requests[1:]]
        assert asked == [True] + [False] * 11
    monkeypatch.undo()
    with FakeEngine(model_path=str(other)) as engine:
        monkeypatch.setattr(teacher_servers, "check_same_tokens", lambda student, folder: real_same(own, folder))
        with pytest.raises(ModelFolderError, match="has another tokenizer"):
            setup.train(**taught(engine))
        assert not engine.requests


real_same = teacher_servers.check_same_tokens


def test_an_upstream_has_its_address_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"big": {"base_url": "http://h:1/v1", "api_key_env": "BIG_KEY"}, "own": {"base_url": "http://h:2"}}
    upstreams = RunConfig(
        name="r",
        model="tiny",
        proxy={"upstreams": known},
    ).proxy.upstreams
    assert address_of("upstream:own", upstreams) == ("http://h:2", None)
    assert address_of("http://h:3/v1", upstreams) == ("http://h:3", None)
    with pytest.raises(UserError, match="BIG_KEY holds no key"):
        address_of("upstream:big", upstreams)
    monkeypatch.setenv("BIG_KEY", "secret")
    assert address_of("upstream:big", upstreams) == ("http://h:1", "secret")


def test_servers_score_sampled_tokens_at_temperature_1_only() -> None:
    base = {"name": "r", "model": "tiny", "agent": "a:B", "tasks": "t.jsonl"}
    server = {"teacher": "http://h:1", "algorithm": {"distill_coef": 1.0}}
    with pytest.raises(ValidationError, match=r"set rollout\.sampling\.temperature to 1, not 0\.7"):
        RunConfig(**base, trainer=server, rollout={"sampling": {"temperature": 0.7}})
    with pytest.raises(ValidationError, match="scores sampled tokens only"):
        RunConfig(**base, trainer=server | {"algorithm": {"distill_coef": 1.0, "distill": "full"}})

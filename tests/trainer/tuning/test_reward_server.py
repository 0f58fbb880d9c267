"""A trained reward model as a server, and the verifier that asks it."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
import uvicorn
from transformers import AutoModelForSequenceClassification
from tuning_setup import config_of, random_items

from agentrl.cli.scorer import scorer as command
from agentrl.engine.server_process import free_port
from agentrl.environment import SCORERS
from agentrl.errors import ModelFolderError, UserError
from agentrl.models import resolve_model
from agentrl.rollout.rewards.function_call import Unusable
from agentrl.rollout.verifiers import trained_reward
from agentrl.rollout.verifiers.trained_reward import TrainedReward
from agentrl.trainer.distributed import World
from agentrl.trainer.stop import Stop
from agentrl.trainer.tuning import reward_server
from agentrl.trainer.tuning.items import split
from agentrl.trainer.tuning.reward_scoring import RewardScorer
from agentrl.trainer.tuning.reward_server import RewardServer
from agentrl.trainer.tuning.tuning_loop import tune

TALKS = [[{"role": "user", "content": "abcd"}, {"role": "assistant", "content": text}] for text in ("dcba", "ab", "x")]


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained reward model."""
    runs = tmp_path_factory.mktemp("runs")
    made = config_of("reward-model", runs, batch_size=4, lr=1e-3).model_copy(update={"steps": 1})
    tune(made, resolve_model("tiny"), split(random_items("reward-model", 4), 0, 0, []), world, Stop())
    return runs / "test" / "model"


@pytest.fixture(scope="module")
def scorer(folder: Path) -> RewardScorer:
    return RewardScorer(folder, "cpu")


@contextmanager
def serving(scorer: RewardScorer, key: str | None = None) -> Iterator[str]:
    app = RewardServer(scorer, "m", key).app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def url(scorer: RewardScorer) -> Iterator[str]:
    with serving(scorer) as address:
        yield address


def test_rewards_are_those_of_transformers_for_each_conversation_alone(folder: Path, scorer: RewardScorer) -> None:
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    sequences = [scorer.encode(talk) for talk in TALKS]
    assert len({len(ids) for ids in sequences}) > 1
    assert all(ids[-1] in scorer.renderer.stop_token_ids for ids in sequences)
    with torch.no_grad():
        alone = [plain(input_ids=torch.tensor([ids])).logits.item() for ids in sequences]
    assert scorer.rewards(sequences) == pytest.approx(alone, abs=1e-5)


async def test_the_verifier_asks_the_server(url: str, scorer: RewardScorer) -> None:
    rewards = scorer.rewards([scorer.encode(talk) for talk in TALKS])
    ask = TrainedReward(url, scale=2.0, center=0.5)
    asked: list[list[dict[str, Any]]] = [[*talk[:-1], talk[-1] | {"refusal": None, "extra": 1}] for talk in TALKS]
    found = await asyncio.gather(*(ask(messages) for messages in asked))
    assert list(found) == pytest.approx([2 * (reward - 0.5) for reward in rewards], abs=1e-4)


async def test_the_verifier_waits_for_the_scorer_that_the_run_starts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_reward, "PAUSE_S", 0.01)
    port = free_port()
    monkeypatch.setenv(SCORERS, json.dumps({"runs/style/model": f"http://127.0.0.1:{port}"}))
    asked = asyncio.create_task(TrainedReward(model="runs/style/model")(TALKS[0]))
    await asyncio.sleep(0.1)
    assert not asked.done()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one request to the scorer, from the port where a scorer starts late."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        async with httpx.AsyncClient() as http:
            answer = (await http.post(f"{url}/score", content=body)).content
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", port):
        assert await asked == pytest.approx(await TrainedReward(url)(TALKS[0]))


async def test_a_reward_model_without_a_scorer_is_an_error_that_no_repetition_helps() -> None:
    with pytest.raises(Unusable, match="no scorer runs for runs/x: `agentrl train` starts one; elsewhere give `url`"):
        await TrainedReward(model="runs/x")(TALKS[0])
    for wrong in ({}, {"url": "http://x", "model": "y"}):
        with pytest.raises(UserError, match="give either `url`"):
            TrainedReward(**wrong)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not a request"),
        (b"[]", "not a request"),
        (b'{"conversations": []}', "a list of 1 to 256"),
        (b'{"conversations": [{"messages": [{"role": "user", "content": "x"}]}]}', "must be the assistant's"),
        (b'{"conversations": [{"messages": "x"}]}', ""),
    ],
)
def test_an_invalid_request_is_refused(url: str, body: bytes, message: str) -> None:
    answer = httpx.post(f"{url}/score", content=body)
    assert answer.status_code == 422
    assert message in answer.json()["error"]["message"]


def test_long_conversations_and_bodies_are_refused(url: str, scorer: RewardScorer) -> None:
    long = {"conversations": [{"messages": [TALKS[0][0], {"role": "assistant", "content": "a" * 50_000}]}]}
    assert "more than the model's context" in httpx.post(f"{url}/score", json=long).json()["error"]["message"]
    assert httpx.post(f"{url}/score", content=b" " * (17 * 2**20)).status_code == 413


async def test_a_key_is_required_where_there_is_one(scorer: RewardScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_KEY", "k-right")
    with serving(scorer, "k-right") as address:
        assert isinstance(await TrainedReward(address, key_env="SCORER_KEY")(TALKS[0]), float)
        with pytest.raises(UserError, match="answered 401"):
            await TrainedReward(address)(TALKS[0])
    with pytest.raises(UserError, match="NO_KEY is not set"):
        TrainedReward("http://x", key_env="NO_KEY")


class Broken:
    """A scorer whose computation fails as none should."""

    def encode(self, messages: Any, tools: Any = None) -> list[int]:
        return [1]

    def rewards(self, sequences: Any) -> list[float]:
        raise IndexError("no such row")


def test_an_error_of_the_computation_answers_all_and_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(reward_server.signal, "raise_signal", ended.append)
    with serving(cast(RewardScorer, Broken())) as address:
        assert httpx.post(f"{address}/score", json={"conversations": [{"messages": TALKS[0]}]}).status_code == 500
    assert ended == [signal.SIGTERM]


def test_another_model_and_an_open_address_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelFolderError, match="is not a reward model"):
        RewardScorer(tiny_model, "cpu")
    with pytest.raises(UserError, match=r"--host 0\.0\.0\.0: set AGENTRL_SCORER_KEY"):
        command("m", host="0.0.0.0")

"""`trainer.routing_replay`: the experts of every training call are recorded, whatever happens to its engines."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from databases import Databases
from sqlalchemy import select

from agentrl.domain.experts.routed_experts import RouteOrigin, RoutingShape
from agentrl.domain.schemas import Batch
from agentrl.engine.server_process import free_port
from agentrl.errors import ModelFolderError
from agentrl.models import routing_shape
from agentrl.proxy.calls import call_records
from agentrl.proxy.engines import pool as pools
from agentrl.store.audit import run_audit
from agentrl.store.db import codec, experts_codec
from agentrl.store.exports import token_rows
from agentrl.store.tables import interaction_data, interactions, routed_experts
from agentrl.store.training import steps, trainer_epochs
from agentrl.testing import FakeEngine, Reply
from agentrl.testing.fake_routing import as_reported, chosen_experts

from .conftest import CONFIG, MANY_SESSIONS, add_run
from .test_failover import Fleet, agent, alphabet, new_version, publish

SHAPE = RoutingShape(layers=2, top_k=3, experts=9)
AGENTS = 16
ROUTED = CONFIG | {
    "rollout": {"group_size": 2} | MANY_SESSIONS["rollout"],
    "trainer": MANY_SESSIONS["trainer"] | {"routing_replay": "engine"},
}


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model's folder with a configuration that has experts: the proxy reads nothing else of it."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"num_hidden_layers": SHAPE.layers, "num_experts_per_tok": SHAPE.top_k, "num_experts": SHAPE.experts}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return folder


@pytest.fixture
def pause() -> str:
    return "retract"


@pytest.fixture
def store_url(databases: Databases, database_kind: str, mixture_folder: Path, pause: str) -> Iterator[str]:
    with databases.lent(database_kind) as url:
        add_run(url, ROUTED | {"publish": {"pause": pause}}, mixture_folder)
        yield url


@pytest.fixture
def fake_engine() -> Iterator[FakeEngine]:
    with FakeEngine(routing=SHAPE) as engine:
        yield engine


@pytest.fixture
def fleet(
    proxy: Any, store_url: str, serve: Callable[..., Any], until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    monkeypatch.setattr(pools, "WATCH_EVERY_S", 0.1)
    port = free_port()
    with (
        FakeEngine(alphabet, token_delay_s=0.03, routing=SHAPE) as one,
        FakeEngine(alphabet, token_delay_s=0.03, routing=SHAPE) as two,
        serve(store_url, [one.url, two.url], port, replica="fleet"),
    ):
        found = Fleet(replace(proxy, url=f"http://127.0.0.1:{port}", engine=one), [one, two])
        until(lambda: found.serving().count("serving") >= 2)
        yield found


def play(fleet: Fleet, trouble: Callable[[], None]) -> None:
    """Agents of training sessions, while `trouble` goes on; then their sessions end with a reward."""
    sessions = [session for _ in range(AGENTS // 2) for session in fleet.proxy.post("/groups").json()["sessions"]]
    troubled = threading.Event()

    async def everybody() -> None:
        async with openai.AsyncOpenAI(api_key="each has its own", max_retries=0) as sdk:
            goes_on = lambda: not troubled.is_set()  # noqa: E731
            await asyncio.gather(*(agent(sdk, session, n, goes_on) for n, session in enumerate(sessions)))

    with ThreadPoolExecutor(1) as beside:
        playing = beside.submit(lambda: asyncio.run(everybody()))
        try:
            trouble()
        finally:
            troubled.set()
        playing.result(120)
    for session in sessions:
        fleet.proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0})
        assert fleet.proxy.post(f"/sessions/{session['session_id']}/end").status_code == 200


def accounted(proxy: Any) -> Counter[RouteOrigin]:
    """The positions of all answered calls by origin. Every call has a row for each of its own positions, and recorded
    experts are those that the engine had for the position's token and weights.
    """
    total: Counter[RouteOrigin] = Counter()
    with proxy.database.read() as conn:
        rows = conn.execute(
            select(interactions.c.parent_id, interactions.c.prompt_tokens, interaction_data, routed_experts)
            .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
            .outerjoin(routed_experts, routed_experts.c.interaction_id == interactions.c.id)
            .where(interactions.c.status == "complete")
        ).all()
        ids: dict[str, list[int]] = {}
        waiting = list(rows)
        while waiting:
            row = waiting.pop(0)
            if row.parent_id is not None and row.parent_id not in ids:
                waiting.append(row)
                continue
            before = ids.get(row.parent_id, [])
            delta, output = (codec.unpack_ids(blob).tolist() for blob in (row.prompt_delta_ids, row.output_ids))
            whole = ids[row.interaction_id] = [*before, *delta, *output]
            assert row.start is not None, "a call without a row for its experts"
            assert row.start == max(0, len(before) - 1)
            experts = experts_codec.unpack(row.data)
            assert len(experts) == len(whole) - 1 - row.start
            counts = experts.counts()
            total.update(counts)
            assert (row.recorded, row.recomputed, row.missing) == tuple(
                counts[o] for o in (RouteOrigin.RECORDED, RouteOrigin.RECOMPUTED, RouteOrigin.MISSING)
            )
            versions = [version for version, start, end in row.spans for _ in range(start, end)]
            of_position = [versions[max(0, p + 1 - row.prompt_tokens)] for p in range(row.start, len(whole) - 1)]
            expected = chosen_experts(whole[row.start : -1], of_position, SHAPE, row.start)
            recorded = experts.origins == RouteOrigin.RECORDED
            np.testing.assert_array_equal(experts.ids[recorded], np.sort(expected, 2)[recorded])
    return total


def leased(proxy: Any, groups: int) -> Batch:
    """A batch of the finished groups."""
    with proxy.database.write() as conn:
        epoch = trainer_epochs.begin_epoch(conn, proxy.run_id)
        done = len(steps.of_run(conn, proxy.run_id))
        step_id = steps.lease(conn, proxy.run_id, epoch, step=done + 1, n_groups=groups, max_staleness=9, discount=1.0)
        assert step_id is not None
        return steps.batch(conn, step_id)


@pytest.fixture
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of any size are read as large ones are."""
    monkeypatch.setattr(call_records, "INLINE_BYTES", 0)


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_a_publish_under_load_leaves_no_token_unaccounted(fleet, tmp_path, until, pause) -> None:
    new_version(fleet.proxy, tmp_path)

    def trouble() -> None:
        until(lambda: all(len(engine.running) >= 3 for engine in fleet.engines))
        publish(fleet)

    play(fleet, trouble)
    total = accounted(fleet.proxy)
    assert total[RouteOrigin.RECORDED]
    assert bool(total[RouteOrigin.RECOMPUTED]) == (pause != "in_place")  # which keeps the cache, and its choices
    assert not total[RouteOrigin.MISSING]
    assert {span[0] for span in fleet.spans()} == {0, 1}
    for t in leased(fleet.proxy, AGENTS // 2).trajectories:
        assert t.routed is not None
        assert t.routed.counts()[RouteOrigin.MISSING] == 1  # the last position
    assert fleet.violations() == []


def test_engines_that_die_leave_no_token_unaccounted(fleet, until) -> None:
    def trouble() -> None:
        for times in range(4):
            engine = fleet.engines[times % 2]
            until(lambda e=engine: len(e.running) >= 3)
            engine.stop()
            hit = fleet.under_way()
            until(lambda: "dead" in fleet.serving())
            engine.start()
            until(lambda: "dead" not in fleet.serving())
            until(lambda h=hit: not h & fleet.under_way())

    play(fleet, trouble)
    total = accounted(fleet.proxy)
    assert total[RouteOrigin.RECORDED]
    assert total[RouteOrigin.RECOMPUTED]
    assert not total[RouteOrigin.MISSING]
    assert {len(t.routed) == len(t.input_ids) for t in leased(fleet.proxy, AGENTS // 2).trajectories} == {True}
    assert fleet.violations() == []


@pytest.mark.usefixtures("in_a_thread")
def test_a_call_asks_for_the_positions_that_its_parent_has_not(proxy) -> None:
    session = proxy.session()
    sdk, messages = proxy.sdk(session), [{"role": "user", "content": "hi"}]
    proxy.engine.enqueue(proxy.says("one"), Reply(proxy.says("two"), cached_tokens=3))
    for text in ("a", "b"):
        answer = sdk.chat.completions.create(model="test", messages=messages).choices[0].message
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": text}]
    first, second = proxy.engine.requests
    assert first["return_routed_experts"]
    assert second["return_routed_experts"]
    end = len(first["input_ids"]) + len(proxy.says("one"))
    assert (first["routed_experts_start_len"], second["routed_experts_start_len"]) == (0, end - 1)
    assert accounted(proxy)[RouteOrigin.MISSING] == 0
    proxy.post(f"/sessions/{session['session_id']}/reward", {"value": 1.0})
    proxy.post(f"/sessions/{session['session_id']}/end")
    with proxy.database.read() as conn:
        (told,) = token_rows.of_session(conn, session["session_id"])
        assert told["expert_origins"].tolist() == [1] * 3 + [2] * (end - 1 - 3) + [1] * (
            len(told["input_ids"]) - end
        ) + [0]
        assert conn.scalars(select(routed_experts.c.computed_from).order_by(routed_experts.c.start)).all() == [0, 3]
        assert list(run_audit.scan(conn, proxy.run_id)) == []


def test_an_evaluation_records_none(proxy) -> None:
    session = proxy.session(sampling={"temperature": 1.0})
    proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "hi"}])
    assert "return_routed_experts" not in proxy.engine.requests[0]
    with proxy.database.read() as conn:
        assert conn.execute(select(routed_experts)).all() == []


def test_an_engine_without_experts_leaves_them_missing_and_garbage_fails_the_call(proxy) -> None:
    sdk = proxy.sdk(proxy.session())
    ask: Any = {"model": "test", "messages": [{"role": "user", "content": "hi"}]}
    proxy.engine.routing = None
    sdk.chat.completions.create(**ask)
    total = accounted(proxy)
    assert total[RouteOrigin.MISSING]
    assert not total[RouteOrigin.RECORDED]
    short = as_reported(chosen_experts([1, 2], [0, 0], SHAPE))
    for garbage in (short, "no base64", as_reported(np.full((2, 1, 1), 1, np.int32))):
        proxy.engine.enqueue(Reply(proxy.says("x"), routed_experts=garbage))
        with pytest.raises(openai.APIStatusError) as refused:
            sdk.chat.completions.create(**ask)
        assert refused.value.status_code == 502
    assert accounted(proxy) == total


def test_a_model_without_experts_is_refused_in_one_line(tiny_model) -> None:
    with pytest.raises(
        ModelFolderError, match=r"^trainer.routing_replay: model folder \S+ has no experts: set it to off$"
    ):
        routing_shape(tiny_model)

"""What `agentrl engine check` finds out about engines of both backends, and what it says is missing."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from agentrl.console import Console
from agentrl.doctor.engine_examination import LACKS, EngineReport, examine
from agentrl.doctor.engine_probe import COLD, LEAST_SPREAD, WARM, scales
from agentrl.doctor.show_engine import show_engine
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import Capability, Health
from agentrl.engine.server_process import free_port
from agentrl.testing import FakeEngine, FakeVLLM, Reply

FAKES: dict[str, Callable[..., FakeEngine]] = {"sglang": FakeEngine, "vllm": FakeVLLM}
KINDS = pytest.mark.parametrize("kind", FAKES)


async def check(engine: FakeEngine, key: str | None = None, backend: str | None = None) -> EngineReport:
    return await examine(engine.url, key, backend, 10.0)


@KINDS
async def test_an_engine_that_agentrl_started_is_recognized_and_ready(kind: str) -> None:
    with FAKES[kind](key="k", context_length=512, model_path="/models/tiny") as engine:
        report = await check(engine, "k")
    assert (report.backend, report.title) == (kind, BACKENDS[kind].support.title)
    assert (report.release, report.health, report.requires_key) == (engine.server_release, Health.SERVING, True)
    assert (report.model, report.version, report.context_tokens) == ("/models/tiny", 0, 512)
    assert report.probe is not None
    assert len(report.probe.ids) == len(report.probe.logprobs) == 4
    assert (report.probe.spans, report.probe.follows_temperature) == ([(0, 0, 4)], True)
    assert Capability.WEIGHTS in report.capabilities
    assert (report.problems, report.notes, report.ready) == ([], [], True)
    assert not [path for path, _ in engine.calls if "abort" not in path], "it changed something"


@KINDS
async def test_every_capability_is_had_or_lacks_with_its_effect(kind: str) -> None:
    assert LACKS.keys() == set(Capability)
    with FAKES[kind]() as engine:
        report = await check(engine)
    assert {*report.capabilities, *(lack.capability for lack in report.lacks)} == set(Capability)
    adapters = BACKENDS[kind].support.options[Capability.ADAPTERS]
    assert "--lora-rank" in adapters


@KINDS
async def test_keys_are_judged(kind: str) -> None:
    with FAKES[kind](key="k") as engine:
        assert (await check(engine)).problems == ["it requires its key: set AGENTRL_ENGINE_KEY"]
        assert (await check(engine, "other")).problems == ["it refuses the key in AGENTRL_ENGINE_KEY"]
    with FAKES[kind]() as engine:
        report = await check(engine, "k")
    assert (report.requires_key, report.ready) == (False, True)
    assert report.notes == ["it requires no key: everybody who reaches it can change its weights"]


@KINDS
async def test_releases_are_judged(kind: str) -> None:
    title = BACKENDS[kind].support.title
    with FAKES[kind]() as engine:
        engine.server_release = "0.5.0" if kind == "sglang" else "0.31.2"
        old = await check(engine)
        engine.server_release = "9.0.0.dev3+g12ab"
        new = await check(engine)
    assert [problem for problem in old.problems if f"{title} {old.release} is too old" in problem]
    assert new.ready
    assert f"{title} 9.0.0.dev3+g12ab is newer than the newest tested one" in new.notes[0]


@KINDS
async def test_an_engine_that_is_paused_or_dead_is_not_ready(kind: str) -> None:
    with FAKES[kind]() as engine:
        engine.paused = True
        report = await check(engine)
        assert report.problems == ["it is paused, or still starting: it was not sampled from"]
        assert (report.health, report.probe) == (Health.PAUSED, None)
    report = await check(engine)
    assert report.health is Health.DEAD
    assert "it does not answer: " in report.problems[0]
    assert "backend" not in report.problems[0]


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply([5, 6]), "it sampled 2 tokens instead of 4"),
        (Reply([5, 6, 7, 8], logprobs=[-1.0, 0.5, -1.0, -1.0]), "logprobs that are not those of a token"),
        (Reply([5, 6, 7, 8], versions=[3, 3, 3, 3]), r"its tokens have versions \[\(3, 0, 4\)\], but it reports 0"),
        (Reply([5, 6, 7, 8], omit=frozenset({"output_token_logprobs"})), "does not sample 4 tokens: .*lacks"),
        (Reply(status=500, error="no room"), "does not sample 4 tokens: .*no room; start it by agentrl engine"),
    ],
)
async def test_a_wrong_answer_is_a_problem(reply: Reply, problem: str) -> None:
    with FakeEngine() as engine:
        engine.enqueue(reply, reply)
        report = await check(engine)
    assert not report.ready
    assert re.search(problem, report.problems[0])


async def test_sglang_with_a_label_that_is_no_version_is_told_what_to_set() -> None:
    with FakeEngine() as engine:
        engine.version = "default"
        report = await check(engine)
    label = "its weights have the label 'default', which is no version: start it with --weight-version 0"
    assert report.problems == [label]


async def test_a_stock_vllm_can_be_trained_with_adapters_once_it_has_a_label() -> None:
    with FakeVLLM(stock=True) as engine:
        fresh = await check(engine)
        engine.version = "0"
        labelled = await check(engine)
    assert ["/update_weight_version" in problem for problem in fresh.problems] == [True]
    assert labelled.ready
    lacks = {lack.capability: lack.option for lack in labelled.lacks}
    assert lacks[Capability.EARLY_SPANS] == lacks[Capability.WEIGHTS] == "by agentrl engine --backend vllm"
    with FakeVLLM(stock=True, takes_adapters=False) as engine:
        engine.version = "0"
        report = await check(engine)
    assert report.problems == ["its weights cannot be changed: start it by agentrl engine --backend vllm"]


@pytest.mark.parametrize(
    ("started", "problem"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "needs --logprobs-mode processed_logprobs"),
        ({"scale_out": False}, "--enable-scale-out"),
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
async def test_a_stock_vllm_is_told_the_options_that_it_lacks(started: dict[str, Any], problem: str) -> None:
    with FakeVLLM(stock=True, **started) as engine:
        engine.version = "0"
        report = await check(engine)
    assert not report.ready
    assert problem in report.problems[-1]


async def test_another_server_is_not_taken_for_an_engine() -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.json_response({"hello": "world"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hello)
    async with TestServer(app) as server:
        report = await examine(str(server.make_url("/")).rstrip("/"), None, None, 10.0)
    assert report.problems == ["it does not answer as SGLang or vLLM"]
    with FakeEngine() as engine:
        assert (await check(engine, backend="vllm")).problems == ["it does not answer as vLLM"]


@given(st.floats(LEAST_SPREAD, 50.0), st.floats(-0.09, 0.09))
def test_noise_does_not_hide_what_the_temperature_does(spread: float, noise: float) -> None:
    assert scales(spread, spread * WARM / COLD + noise) is True
    assert scales(spread, spread + noise) is False
    assert scales(LEAST_SPREAD / 2, spread) is scales(None, spread) is scales(spread, None) is None


@KINDS
async def test_a_report_is_shown_and_can_be_written_as_json(kind: str) -> None:
    with FAKES[kind](takes_adapters=False) as engine:
        engine.server_release = "0.1"
        report = await check(engine)
    console = Console(record=True, width=200, file=io.StringIO())
    show_engine(report, console)
    text = console.export_text()
    assert f"{engine.url} · serving" in text
    assert "\nnot ready for training\n✗ " in text
    assert "–  adapters" in text
    assert "ids 7, 14, 21, 2" in text
    found = json.loads(json.dumps(report.as_json()))
    assert found["ready"] is False
    assert found["probe"]["ids"] == [7, 14, 21, 2]
    assert found["lacks"][0].keys() == {"capability", "effect", "option"}


async def test_a_report_without_an_answer_is_shown() -> None:
    report = await examine(f"http://127.0.0.1:{free_port()}", None, None, 1.0)
    console = Console(record=True, width=200, file=io.StringIO())
    show_engine(report, console)
    assert "· dead\n\nnot ready for training\n✗ it does not answer" in console.export_text()

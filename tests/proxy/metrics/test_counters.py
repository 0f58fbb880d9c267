"""/metrics: what is counted, who may read it, and that it costs a call little."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl.proxy.metrics import scrape
from agentrl.proxy.metrics.counters import STAGES, Metrics
from agentrl.proxy.metrics.scrape import Scrape
from agentrl.testing import Reply

RUN = {"Authorization": "Bearer run-key"}


def numbers(proxy: Any, headers: dict[str, str] = RUN) -> dict[str, float]:
    """Every sample as `name{label="value",…}`."""
    answer = proxy.http.get(f"{proxy.url}/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


def samples(said: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(said):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def ask(proxy: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    session = proxy.session(metadata={})
    answer: httpx.Response = proxy.post(f"/sessions/{session['session_id']}{path}", body)
    return answer


MESSAGES = [{"role": "user", "content": "hi"}]


def test_calls_are_counted_by_dialect_and_status(proxy, until):
    ask(proxy, "/v1/chat/completions", {"messages": MESSAGES})
    ask(proxy, "/v1/chat/completions", {"messages": MESSAGES, "stream": True})
    ask(proxy, "/v1/messages", {"model": "default", "messages": MESSAGES, "max_tokens": 5})
    ask(proxy, "/v1/chat/completions", {"messages": MESSAGES, "no_such": 1})
    ask(proxy, "/v1/chat/completions", {"messages": MESSAGES, "model": "other"})
    until(lambda: numbers(proxy)["agentrl_calls_in_flight"] == 0)
    found = numbers(proxy)
    assert found['agentrl_calls_total{dialect="openai.chat",status="200"}'] == 2
    assert found['agentrl_calls_total{dialect="anthropic.messages",status="200"}'] == 1
    assert found['agentrl_calls_total{dialect="openai.chat",status="404"}'] == 1
    assert found['agentrl_errors_total{code="model_not_found",status="404"}'] == 1
    assert found['agentrl_call_seconds_count{dialect="openai.chat"}'] == 4
    assert found["agentrl_streams_open"] == 0


def test_calls_under_way_are_shown(proxy, fake_engine, until):
    fake_engine.enqueue(Reply([5, 6, 7, 2], hold_after=1))
    body = {"messages": MESSAGES, "stream": True}
    asking = threading.Thread(target=ask, args=(proxy, "/v1/chat/completions", body))
    asking.start()
    until(lambda: fake_engine.holding == 1)
    found = numbers(proxy)
    assert found["agentrl_calls_in_flight"] == 1
    assert found[f'agentrl_engine_calls{{engine="{fake_engine.url}"}}'] == 1
    assert found[f'agentrl_engine_usable{{engine="{fake_engine.url}"}}'] == 1
    fake_engine.release()
    asking.join(120)
    until(lambda: numbers(proxy)["agentrl_calls_in_flight"] == 0)
    assert numbers(proxy)[f'agentrl_engine_calls{{engine="{fake_engine.url}"}}'] == 0


def test_the_metrics_show_the_writer_the_run_and_its_engines(proxy, fake_engine, until):
    until(lambda: f'agentrl_engine_state{{engine="{fake_engine.url}",state="serving"}}' in numbers(proxy))
    proxy.post("/groups")
    proxy.post("/groups")
    found = numbers(proxy)
    assert found["agentrl_commit_units_count"] >= 2
    assert found["agentrl_commit_units_sum"] >= found["agentrl_commit_units_count"]
    assert found["agentrl_commit_seconds_count"] == found["agentrl_commit_units_count"]
    assert found["agentrl_commit_queue"] == 0
    assert found["agentrl_groups_admitted"] == 2
    assert found['agentrl_sessions{status="open"}'] == 4
    assert found[f'agentrl_engine_version{{engine="{fake_engine.url}"}}'] == 0
    assert (found["agentrl_run_version"], found["agentrl_run_target_steps"], found["agentrl_store_up"]) == (0, 10, 1)


def test_refused_admission_is_counted(proxy):
    while (answer := proxy.post("/groups")).status_code == 201:
        pass
    assert answer.status_code == 429
    assert numbers(proxy)['agentrl_errors_total{code="no_capacity",status="429"}'] == 1


def test_the_metrics_need_a_run_or_an_admin_key(proxy):
    session = proxy.session()
    for key, status in (("run-key", 200), ("admin-key", 200), (session["api_key"], 403), ("wrong", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert proxy.http.get(f"{proxy.url}/metrics", headers=headers).status_code == status
    assert proxy.http.get(f"{proxy.url}/metrics").status_code == 401


class TestPublic:
    @pytest.fixture
    def run_config(self, run_config: dict[str, Any]) -> dict[str, Any]:
        return {**run_config, "proxy": {"metrics_public": True}}

    def test_public_metrics_need_no_key(self, proxy):
        assert "agentrl_run_version 0.0" in proxy.http.get(f"{proxy.url}/metrics").text


def test_the_metrics_hold_no_key_and_no_password(proxy):
    session = proxy.session()
    proxy.post("/groups", headers={"Authorization": "Bearer wrong-key-1234"})
    said = proxy.http.get(f"{proxy.url}/metrics", headers=RUN).text
    for secret in ("run-key", "admin-key", "wrong-key-1234", session["api_key"], session["session_id"]):
        assert secret not in said


async def test_a_database_that_is_away_is_shown(monkeypatch):
    monkeypatch.setattr(scrape, "STORE_TIMEOUT_S", 0.01)

    class Away:
        run_id = "r"

        async def read(self, *_: Any) -> None:
            await asyncio.sleep(60)

        class database:
            queued = 7

    class Pool:
        engines: tuple[Any, ...] = ()

    body, _ = await Scrape(Metrics(), Away(), Pool()).text("")  # type: ignore[arg-type]
    found = samples(body.decode())
    assert (found["agentrl_store_up"], found["agentrl_commit_queue"]) == (0, 7)


def test_the_figures_of_calls_are_summed():
    counts = Metrics()
    since = counts.begun()
    for stage in STAGES:
        since = counts.stage(stage, since)
    counts.answered(prompt_tokens=10, cached_tokens=4, output_tokens=3, fork_reason="compacted", bridged=False)
    counts.answered(prompt_tokens=20, cached_tokens=0, output_tokens=5, fork_reason=None, bridged=True)
    counts.ended("aborted")
    counts.retried("claimed")
    body = scrape.encoded(counts.registry, None, scrape.choose_encoder("")[0]).decode()
    found = samples(body)
    assert [found[f'agentrl_tokens_total{{kind="{kind}"}}'] for kind in ("prompt", "cached", "output")] == [30, 4, 8]
    assert [found[f'agentrl_interactions_total{{outcome="{o}"}}'] for o in ("complete", "aborted")] == [2, 1]
    assert found['agentrl_forks_total{reason="compacted"}'] == 1
    assert found["agentrl_bridged_total"] == 1
    assert found['agentrl_retries_total{how="claimed"}'] == 1
    assert {found[f'agentrl_stage_seconds_count{{stage="{stage}"}}'] for stage in STAGES} == {1}


def one_call(counts: Metrics) -> None:
    """All that a call of the policy tells."""
    since = at = counts.begun()
    for stage in STAGES:
        at = counts.stage(stage, at)
    counts.answered(prompt_tokens=2000, cached_tokens=1900, output_tokens=300, fork_reason=None, bridged=True)
    counts.over("openai.chat", 200, since)


def test_a_call_looks_up_no_metric_by_label(monkeypatch):
    """Binding a child costs more than all the rest, so it is done once."""
    counts = Metrics()
    one_call(counts)

    def labels(*_: Any) -> Any:
        raise AssertionError("a child was looked up")

    monkeypatch.setattr("prometheus_client.metrics.MetricWrapperBase.labels", labels)
    one_call(counts)


def test_a_dead_engine_is_shown_as_dead(proxy, fake_engine, until):
    fake_engine.stop()
    until(lambda: numbers(proxy).get(f'agentrl_engine_state{{engine="{fake_engine.url}",state="dead"}}') == 1)
    assert numbers(proxy)[f'agentrl_engine_usable{{engine="{fake_engine.url}"}}'] == 0
    fake_engine.start()

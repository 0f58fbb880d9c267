"""Evaluations by real workers against a real proxy: apart from training, resumed, honest about versions, repeatable."""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from databases import KINDS, Databases
from run_records import create_run
from serving import add_version
from sqlalchemy import Connection, select

from agentrl.client import AsyncClient
from agentrl.configs.config_files import parse_config
from agentrl.configs.evaluation_config import EvalSampling
from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.domain.evaluation import Episode, Label
from agentrl.domain.schemas import TrainedBatch, TrainedTrajectory
from agentrl.engine.server_process import free_port
from agentrl.errors import RequestError
from agentrl.rollout import held_out
from agentrl.rollout.held_out import Evaluator, Setting, settings_of
from agentrl.rollout.http import agent_http
from agentrl.rollout.score import Result, Reward
from agentrl.rollout.worker import work
from agentrl.rollout.worker_display import Progress
from agentrl.store import Database, evaluation_episodes, runs
from agentrl.store.audit import run_audit
from agentrl.store.db import codec
from agentrl.store.tables import (
    groups,
    interaction_data,
    interactions,
    rewards,
    sessions,
    trajectories,
    weight_versions,
)
from agentrl.store.training import steps, trainer_epochs, version_states
from agentrl.testing import FakeEngine

STEPS = 4
AGENT = """
import asyncio, os

class Agent:
    async def run(self, data, **extra):
        '''Two calls; worth what the answer makes of it. It writes down what it plays, and may hang.'''
        if extra["is_eval"]:
            with open("played.txt", "a") as file:
                file.write(f"{data['n']}\\n")
            if os.path.exists("hang") and len(open("played.txt").readlines()) > 5:
                open("hangs", "w").close()
                await asyncio.sleep(3600)
        messages = [{"role": "user", "content": f"task {data['n']}"}]
        for _ in range(2):
            answer = await extra["http_client"].post(
                extra["base_url"] + "/chat/completions", json={"model": "default", "messages": messages},
                headers={"Authorization": "Bearer " + extra["api_key"]},
            )
            answer.raise_for_status()
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        return sum(map(ord, messages[-2]["content"] or "")) % 7 / 6

def tasks():
    return [{"n": n} for n in range(4)]

def heldout():
    return [{"n": n} for n in range(100, 103)]
"""
EVALUATION = {"tasks": "player:heldout", "every": 2, "samples": 2, "settings": {"cool": {"temperature": 0.5}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "player.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("player", None)


def config(**evaluation: Any) -> RunConfig:
    return parse_config(
        {
            "name": "test",
            "model": "tiny",
            "agent": "player:Agent",
            "tasks": "player:tasks",
            "steps": STEPS,
            "rollout": {"group_size": 2, "max_concurrent_groups": 1},
            "trainer": {"groups_per_step": 2, "max_staleness": 0},
            "evaluation": evaluation,
        }
    )


class Run:
    """A run of its own: database, engine, proxy, and a trainer that only does to the store what a real one does."""

    def __init__(self, url: str, config: RunConfig, model: Path, engine: FakeEngine, folder: Path) -> None:
        self.database, self.config, self.engine, self.folder = Database(url), config, engine, folder
        self.url = f"http://127.0.0.1:{free_port()}"
        with self.database.write() as conn:
            self.id = create_run(
                conn,
                config=config.model_dump(mode="json"),
                task_data=[{"n": n} for n in range(4)],
                base_model=model,
                steps=config.steps,
            )
            self.epoch = trainer_epochs.begin_epoch(conn, self.id)

    def train(self, until: int, *, hold: bool = False) -> None:
        """Train and publish the steps up to `until`."""
        done = self.database.query(runs.get, self.id).published_step
        for step in range(done + 1, until + 1):
            while (
                step_id := self.database.transact(
                    steps.lease, self.id, self.epoch, step=step, n_groups=2, max_staleness=0, discount=1.0
                )
            ) is None:
                time.sleep(0.005)
            batch = self.database.query(steps.batch, step_id)
            trained = [
                TrainedTrajectory(
                    trajectory_id=t.trajectory_id,
                    advantage=0.0,
                    staleness_max=0,
                    staleness_mean=0.0,
                    tokens_trained=int(t.loss_mask.sum()),
                )
                for t in batch.trajectories
            ]
            facts = TrainedBatch(
                step_id=step_id, digest=batch.digest(), estimator="grpo", wasted_tokens=0, trained=trained
            )
            version = self.database.query(version_states.next_version, self.id)
            path = self.folder / f"v{version}"
            path.mkdir(exist_ok=True)
            self.database.transact(
                steps.complete, self.id, self.epoch, facts, metrics={}, version=version, path=str(path), checksum="c"
            )
            while hold and self.database.query(evaluation_episodes.paused, self.id, version, self.config):
                time.sleep(0.01)
            self.publish(version)
        self.database.transact(runs.set_status, self.id, "finished")

    def publish(self, version: int) -> None:
        headers = {"Authorization": "Bearer admin-key"}
        body = {"version": version, "epoch": self.epoch}
        httpx.post(f"{self.url}/admin/publish", json=body, headers=headers, timeout=120).raise_for_status()

    def get(self, path: str) -> Any:
        headers = {"Authorization": "Bearer run-key"}
        return httpx.get(f"{self.url}/api/runs/{self.id}/{path}", headers=headers).raise_for_status().json()

    def evaluations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("evaluations")
        return found


@pytest.fixture
def start(databases: Databases, tiny_model: Path, folder: Path, serve: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(held_out, "LOOK_S", 0.01)

    @contextmanager
    def start(config: RunConfig, kind: str = "sqlite") -> Iterator[Run]:
        with databases.lent(kind) as url, FakeEngine() as engine:
            run = Run(url, config, tiny_model, engine, folder)
            with serve(url, [engine.url], int(run.url.rpartition(":")[2])):
                yield run
            run.database.close()

    return start


async def play_and_train(run: Run, *, hold: bool = False) -> None:
    """A worker and a trainer, to the end of the run."""
    async with asyncio.TaskGroup() as parts:
        parts.create_task(asyncio.to_thread(run.train, STEPS, hold=hold))
        parts.create_task(
            work(
                run.config,
                settings_of(run.config),
                base_url=run.url,
                api_key="run-key",
                owner="me",
                console=Console(file=io.StringIO()),
            )
        )


def training_data(conn: Connection, run_id: str) -> tuple[Any, ...]:
    """All that is trained or counted, with nothing that time or chance names."""
    of_run = select(groups.c.cursor, groups.c.state, groups.c.size, sessions.c.sample_index, sessions.c.status)
    calls = conn.execute(
        of_run.add_columns(
            interactions.c.seq,
            interactions.c.params,
            interactions.c.prompt_digest,
            interactions.c.status,
            interactions.c.trainable,
            interaction_data.c.prompt_delta_ids,
            interaction_data.c.output_ids,
            interaction_data.c.logprobs,
            interaction_data.c.spans,
        )
        .join(sessions, sessions.c.group_id == groups.c.id)
        .join(interactions, interactions.c.session_id == sessions.c.id)
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(groups.c.run_id == run_id, groups.c.is_eval.is_(False))
        .order_by(groups.c.cursor, sessions.c.sample_index, interactions.c.seq)
    ).all()
    rewarded = conn.execute(
        select(groups.c.cursor, sessions.c.sample_index, rewards.c.value, rewards.c.applied)
        .join(sessions, sessions.c.group_id == groups.c.id)
        .join(rewards, rewards.c.session_id == sessions.c.id)
        .where(groups.c.is_eval.is_(False))
        .order_by(groups.c.cursor, sessions.c.sample_index)
    ).all()
    built = conn.execute(
        select(
            groups.c.cursor,
            sessions.c.sample_index,
            trajectories.c.state,
            trajectories.c.tokens,
            trajectories.c.trainable_tokens,
            trajectories.c.min_version,
            trajectories.c.max_version,
            trajectories.c["return"],
        )
        .join(groups, groups.c.id == trajectories.c.group_id)
        .join(sessions, sessions.c.id == trajectories.c.session_id)
        .order_by(groups.c.cursor, sessions.c.sample_index)
    ).all()
    lineage = [
        (
            s.step,
            s.state,
            s.version_before,
            s.version_after,
            s.groups,
            s.trajectories,
            s.tokens_trained,
            s.staleness_max,
            s.return_mean,
        )
        for s in steps.of_run(conn, run_id)
    ]
    run = runs.get(conn, run_id)
    counters = (run.admitted, run.returned, run.running, run.data_cursor, run.published_step, run.current_version)
    unpacked = [
        (
            *row[:-4],
            *(codec.unpack_ids(row[i]).tolist() for i in (-4, -3)),
            codec.unpack_logprobs(row[-2]).tolist(),
            row[-1],
        )
        for row in map(tuple, calls)
    ]
    return unpacked, [tuple(r) for r in rewarded], [tuple(r) for r in built], lineage, counters


@pytest.mark.parametrize("kind", KINDS)
async def test_an_evaluation_changes_nothing_in_the_training_data_or_the_admission_counters(
    start: Any, kind: str
) -> None:
    found = []
    for evaluation in (EVALUATION, {}):
        with start(config(**evaluation), kind) as run:
            await play_and_train(run)
            found.append(run.database.query(training_data, run.id))
            assert run.database.query(lambda conn: list(run_audit.scan(conn, run.id))) == []
            measured = [(one["step"], one["complete"], one["ended"]) for one in run.evaluations()]
            assert measured == ([(0, True, 6), (2, True, 6), (4, True, 6)] if evaluation else [])
    with_evaluation, without = found
    assert len(without[0]) == STEPS * 2 * 2 * 2  # groups, sessions, calls
    assert without[-1][:4] == (STEPS * 2, 0, 0, STEPS * 2)
    for ours, theirs in zip(with_evaluation, without, strict=True):
        assert ours == theirs


async def test_with_hold_one_version_samples_the_whole_evaluation(start: Any) -> None:
    with start(config(**EVALUATION, hold=True, max_concurrent=1)) as run:
        run.engine.token_delay_s = 0.005
        await play_and_train(run, hold=True)
        for one in run.evaluations():
            result = one["settings"]["cool"]
            assert (result["version_min"], result["version_max"]) == (one["version"], one["version"])
            assert (one["step"], one["complete"]) == (one["version"], True)
        sampled = {r["sampling_params"]["temperature"] for r in run.engine.requests}
        assert sampled == {0.5, 1.0}


@pytest.fixture
async def evaluator(folder: Path) -> AsyncIterator[Any]:
    """Make an evaluator of a run, with an agent of the test's."""
    async with agent_http(20) as http:
        clients: list[AsyncClient] = []

        def make(run: Run, agent: Any, tasks: int, owner: str = "me/1", samples: int = 1, **options: Any) -> Evaluator:
            clients.append(AsyncClient(run.url, "run-key", timeout_s=20))
            setting = Setting(name="s", tasks=[{"n": n} for n in range(tasks)], sampling=EvalSampling(temperature=1.0))
            return Evaluator(
                clients[-1],
                agent,
                [setting],
                samples=samples,
                every=None,
                owner=owner,
                http=http,
                timeout_s=20,
                progress=Progress(),
                **{"max_concurrent": 4} | options,
            )

        yield make
        for client in clients:
            await client.aclose()


class Calling:
    """Makes a call in each episode, and does something before the n-th."""

    def __init__(self, before: dict[int, Callable[[], None]] | None = None) -> None:
        self.before, self.episodes = before or {}, 0

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        self.before.get(self.episodes, lambda: None)()
        self.episodes += 1
        answer = await extra["http_client"].post(
            extra["base_url"] + "/chat/completions",
            json={"model": "default", "messages": [{"role": "user", "content": str(data["n"])}]},
            headers={"Authorization": "Bearer " + extra["api_key"]},
        )
        answer.raise_for_status()
        return 1.0


async def test_weights_that_are_published_meanwhile_are_reported(start: Any, evaluator: Any) -> None:
    with start(config(**EVALUATION)) as run:
        (run.folder / "v7").mkdir()

        def publish() -> None:
            add_version(run.database, run.id, 7, run.folder / "v7")
            run.publish(7)

        playing = evaluator(run, Calling({2: lambda: threading_run(publish)}), 4, max_concurrent=1)
        await playing.evaluate(0, 0)
        (found,) = run.evaluations()
        result = found["settings"]["s"]
        assert (found["step"], found["version"], result["version_min"], result["version_max"]) == (0, 0, 0, 7)
        rows = run.get("evaluations/episodes?version=0")
        assert [(row["evaluation"]["index"], row["version_min"]) for row in rows] == [(0, 0), (1, 0), (2, 7), (3, 7)]


def threading_run(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Stochastic:
    """An environment with tasks of differing hardness, and chance in each episode, all from a seed."""

    def __init__(self, seed: int, scale: int) -> None:
        self.random, self.scale = random.Random(seed), scale

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        hardness = random.Random(data["n"]).betavariate(1.5, 1.5)
        return round(self.scale * (self.random.random() < hardness) * self.random.choice([0.5, 1.0])) / self.scale


@pytest.mark.parametrize(("samples", "scale"), [(1, 1), (1, 2), (4, 2)])
async def test_the_interval_covers_the_value_of_a_repeated_evaluation(
    start: Any, evaluator: Any, samples: int, scale: int
) -> None:
    with start(config(**EVALUATION)) as run:
        (run.folder / "v1").mkdir()
        for version, seed in ((0, 5), (1, 6)):
            if version:
                add_version(run.database, run.id, 1, run.folder / "v1")
            agent = Stochastic(seed, scale)
            await evaluator(run, agent, 24, samples=samples, max_concurrent=1).evaluate(version, version)
        first, again = (one["settings"]["s"] for one in run.evaluations())
        assert first["reward"] != again["reward"]
        assert first["low"] <= again["reward"] <= first["high"]
        assert 0.05 < first["high"] - first["low"] < 0.5
        assert first["episodes"] == 24 * samples


class Voter:
    """Two of three samples agree: on the right answer for even tasks, on a wrong one for odd tasks."""

    def __init__(self) -> None:
        self.played = Counter[int]()

    async def run(self, data: dict[str, Any], **extra: Any) -> Result:
        self.played[data["n"]] += 1
        right = (self.played[data["n"]] < 3) == (data["n"] % 2 == 0)
        return Result(rewards=(Reward(value=float(right)),), answer=42 if right else "no")


async def test_the_answers_of_the_samples_vote(start: Any, evaluator: Any) -> None:
    with start(config(**EVALUATION)) as run:
        await evaluator(run, Voter(), 3, samples=3, max_concurrent=1).evaluate(0, 0)
        (found,) = run.evaluations()
        samples = found["settings"]["s"]["samples"]
        assert samples["maj"] == {"1": pytest.approx(5 / 9), "2": pytest.approx(5 / 9), "3": pytest.approx(2 / 3)}
        rows = run.database.query(evaluation_episodes.episodes, run.id)
        assert Counter(row["answer"] for row in rows) == {"42": 5, "no": 4}


@contextmanager
def processes(run: Run, *owners: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`agentrl rollout` as processes of their own."""
    (run.folder / "run.yaml").write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
    started = []
    for owner in owners:
        line = [sys.executable, "-m", "agentrl", "rollout", "--config", "run.yaml", "--url", run.url, "--owner", owner]
        with (run.folder / f"{owner}.log").open("ab") as log:
            env = os.environ | {"AGENTRL_RUN_KEY": "run-key"}
            started.append(subprocess.Popen(line, cwd=run.folder, env=env, stdout=log, stderr=log))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def ended(conn: Connection, run_id: str) -> Counter[tuple[int, int, str]]:
    """(task, sample, status) of evaluation sessions."""
    rows = [(Label.of(row), row["status"]) for row in evaluation_episodes.episodes(conn, run_id, version=0)]
    return Counter((label.episode.index, label.episode.sample, str(status)) for label, status in rows if label)


ALL = {(index, sample, "completed"): 1 for index in range(3) for sample in range(4)}


def test_a_worker_that_is_killed_leaves_an_evaluation_that_goes_on_where_it_stopped(start: Any, until: Any) -> None:
    with start(config(**EVALUATION | {"samples": 4, "max_concurrent": 2})) as run:
        (run.folder / "hang").touch()
        played = run.folder / "played.txt"
        with processes(run, "me") as (worker,):
            until((run.folder / "hangs").exists, 60)
            until(lambda: len(played.read_text().split()) == 7 and run.database.query(ended, run.id).total() == 5)
            worker.kill()  # while two hang
            worker.wait()
        before = run.database.query(ended, run.id)
        (run.folder / "hang").unlink()
        with processes(run, "me"):
            until(lambda: any(one["complete"] for one in run.evaluations()), 60)
        after = run.database.query(ended, run.id)
        assert {key: n for key, n in after.items() if key[2] == "completed"} == ALL
        assert before == {key: n for key, n in ALL.items() if key in before}
        assert sum(n for key, n in after.items() if key[2] == "abandoned") == 2
        assert len(played.read_text().split()) == 7 + 12 - 5
        assert run.database.query(lambda conn: list(run_audit.scan(conn, run.id))) == []


def test_processes_share_an_evaluation_also_when_one_is_killed(start: Any, until: Any) -> None:
    shared = config(**EVALUATION | {"samples": 4, "max_concurrent": 2})
    shared = shared.model_copy(update={"proxy": shared.proxy.model_copy(update={"heartbeat_timeout_s": 3.0})})
    with start(shared) as run:
        (run.folder / "hang").touch()
        with processes(run, "one") as (worker,):
            until((run.folder / "hangs").exists, 60)
            (run.folder / "hang").unlink()
            with processes(run, "two", "three"):
                until(lambda: run.database.query(ended, run.id).total() >= 10, 60)
                worker.kill()  # nobody restarts it: its sessions are found to be abandoned
                until(lambda: any(one["complete"] for one in run.evaluations()), 60)
        after = run.database.query(ended, run.id)
        assert {key: n for key, n in after.items() if key[2] == "completed"} == ALL


async def test_an_episode_is_the_first_workers_that_claims_it(start: Any) -> None:
    with start(config(**EVALUATION)) as run:
        label = Label(0, 0, Episode("s", 0, 0), 1)
        body = {"is_eval": True, "task": {}, "metadata": label.metadata, "claim": label.episode.claim(0, 0)}
        async with AsyncClient(run.url, "run-key", timeout_s=20) as client:
            first = await client.request("POST", "/groups", body | {"owner": "a/1"})
            assert await client.request("POST", "/groups", body | {"owner": "a/1"}) == first
            for other in ("a/2", "b/1"):
                with pytest.raises(RequestError) as refused:
                    await client.request("POST", "/groups", body | {"owner": other})
                assert (refused.value.status, refused.value.code) == (409, "claimed")
            another = await client.request("POST", "/groups", body | {"owner": "b/1", "claim": "another"})
            assert another["group_id"] != first["group_id"]
            for wrong in (
                {},
                {"owner": "a/1", "is_eval": False},
                {"owner": "a/1", "sampling": {"top_p": 2}},
                {"owner": "a/1", "sampling": {"topp": 1}},
            ):
                with pytest.raises(RequestError) as refused:
                    await client.request("POST", "/groups", body | wrong)
                assert refused.value.status == 422


@pytest.mark.parametrize("kind", KINDS)
async def test_rolled_back_versions_have_no_result_and_a_summary_reads_the_newest(
    start: Any, evaluator: Any, kind: str
) -> None:
    with start(config(**EVALUATION), kind) as run:
        async with AsyncClient(run.url, "run-key", timeout_s=20) as client:
            for version in range(1, 5):
                add_version(run.database, run.id, version, run.folder)
            with run.database.write() as conn:
                change, number = weight_versions.update(), weight_versions.c.version
                conn.execute(change.where(number > 0).values(created_at=time.time()))
                conn.execute(change.where(number == 2).values(state="rolled_back"))
                conn.execute(change.where(number == 3).values(step=2))  # again
                conn.execute(runs.runs.update().values(published_step=4, current_version=4))
            for step, version in ((0, 0), (2, 2), (2, 3), (4, 4)):
                await evaluator(run, Calling(), 2).evaluate(step, version)
            await client.request("POST", "/groups", {"is_eval": True, "task": {}, "metadata": {"evaluation": "mine"}})
            assert [(one["step"], one["version"]) for one in run.evaluations()] == [(0, 0), (2, 3), (4, 4)]
            status = await client.request("GET", "/api/status")
            assert [(one["step"], one["ended"]) for one in status["evaluations"]] == [(2, 2), (4, 2)]

"""Workers as processes share an evaluation, and go on where one was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from sqlalchemy import Connection

from agentrl.client import AsyncClient
from agentrl.domain.evaluation import Episode, Label
from agentrl.errors import RequestError
from agentrl.store import evaluation_episodes
from agentrl.store.audit import run_audit

from .evaluated_run import EVALUATION, Run, config


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


@pytest.mark.long
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

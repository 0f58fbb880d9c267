"""A task runner starts its command, again after a death, together with its gang, and never beside another owner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.environment import storage_variables
from agentrl.errors import StoreUnavailable
from agentrl.placement import rank_lease, task_runner
from agentrl.placement.part_spec import PROXY, PartSpec
from agentrl.placement.task_runner import TaskRunner
from agentrl.processes.restarts import Backoff
from agentrl.store import Database, events, part_ranks, runs
from agentrl.store.tables import runs as runs_table

PART = "part"
SLEEP = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls and back-off without waiting."""
    monkeypatch.setattr(rank_lease, "RENEW_EVERY_S", 0.05)
    monkeypatch.setattr(rank_lease, "CLAIM_EVERY_S", 0.05)
    monkeypatch.setattr(task_runner, "POLL_S", 0.05)
    monkeypatch.setattr(Backoff, "after", lambda self, lived_s: 0.0)


class Host:
    """The runners of one part, in this process, and what their database says."""

    def __init__(self, db: Database, run_id: str, folder: Path) -> None:
        self.db, self.run_id, self.folder = db, run_id, folder

    def declare(self, script: str, **settings: Any) -> PartSpec:
        spec = PartSpec(name=PART, argv=("{python}", "-c", script, *settings.pop("words", ())), **settings)
        self.db.transact(part_ranks.declare, self.run_id, {PART: spec.model_dump(mode="json")})
        return spec

    def runner(self, spec: PartSpec, rank: int = 0, database: Any = None) -> TaskRunner:
        return TaskRunner(
            database or self.db,
            self.run_id,
            spec,
            rank,
            run_dir=self.folder,
            secrets={"AGENTRL_ADMIN_KEY": "s3cret"},
            address="10.1.2.3",
        )

    def ranks(self) -> list[part_ranks.Rank]:
        return self.db.query(part_ranks.ranks, self.run_id, PART)

    def deaths(self) -> list[Any]:
        return [event.data for event in self.db.query(events.of_run, self.run_id, "part_died")]

    def log(self, rank: int | None = None) -> str:
        return (self.folder / "logs" / (f"{PART}.log" if rank is None else f"{PART}-{rank}.log")).read_text()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - the condition is in the database
            await asyncio.sleep(0.02)

    def running(self, count: int = 1) -> bool:
        return [rank.state for rank in self.ranks()].count("running") == count

    def finish_run(self) -> None:
        self.db.transact(_finish, self.run_id)

    def stop(self) -> None:
        self.db.transact(part_ranks.stop, self.run_id)


def _finish(conn, run_id):
    row = runs.get(conn, run_id)
    conn.execute(runs_table.update().where(runs_table.c.id == run_id).values(published_step=row.target_steps))


@pytest.fixture
def host(db: Database, run_id: str, tmp_path: Path) -> Host:
    return Host(db, run_id, tmp_path)


async def test_a_command_gets_its_ports_address_and_named_secrets(host, monkeypatch):
    monkeypatch.setenv("AGENTRL_RUN_KEY", "not for this command")
    spec = host.declare(
        "import json, os, sys; print(json.dumps([sys.argv[1:], {k: os.environ.get(k) for k in "
        "('URL', 'AGENTRL_ADMIN_KEY', 'AGENTRL_RUN_KEY')}]))",
        words=("{rank}/{size}", "{address}:{port:http}"),
        env={"URL": "http://{address}:{port:http}"},
        secrets=("AGENTRL_ADMIN_KEY",),
        ports=("http",),
        ends=True,
    )
    host.finish_run()
    await host.runner(spec).run()
    (rank,) = host.ranks()
    place = f"10.1.2.3:{rank.ports['http']}"
    words, env = json.loads(host.log())
    assert words == ["0/1", place]
    assert env == {"URL": f"http://{place}", "AGENTRL_ADMIN_KEY": "s3cret", "AGENTRL_RUN_KEY": None}
    assert (rank.state, rank.status, rank.starts, rank.live) == ("ended", 0, 1, False)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("names", "stored", "seen"),
    [
        (("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL"), {"AWS_ACCESS_KEY_ID": "run"}, {"AWS_ACCESS_KEY_ID": "run"}),
        (("AWS_ACCESS_KEY_ID",), {}, {"AWS_ACCESS_KEY_ID": "host", "AWS_ROLE_ARN": "host"}),
        ((), {"AWS_ACCESS_KEY_ID": "run"}, {}),
    ],
)
async def test_only_a_command_that_uses_the_storage_gets_the_runs_access_to_it_else_the_hosts(
    host, monkeypatch, names, stored, seen
):
    for name in storage_variables(os.environ):
        monkeypatch.delenv(name)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ROLE_ARN"):
        monkeypatch.setenv(name, "host")
    script = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k[:4] == 'AWS_'}))"
    spec = host.declare(script, secrets=names, ends=True)
    host.finish_run()
    runner = host.runner(spec)
    runner._secrets = stored
    await runner.run()
    assert json.loads(host.log()) == seen


class Counting:
    """A database that counts the reads of the proxies' ranks."""

    def __init__(self, database: Database) -> None:
        self.transact = database.transact
        self._query = database.query
        self.proxies_read = 0

    def query(self, unit: Any, *args: Any) -> Any:
        self.proxies_read += unit is part_ranks.ranks and PROXY in args
        return self._query(unit, *args)


async def test_a_command_reaches_a_live_proxy_and_only_its_connection_reads_which_are_live(host):
    proxy = await asyncio.start_server(_greet, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    spec = host.declare(
        "import os, socket, sys, time; port = int(sys.argv[1].rpartition(':')[2])\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.02)\n"
        "print(socket.create_connection(('127.0.0.1', port)).recv(9).decode())",
        words=("{proxy}", str(host.folder / "go")),
        ends=True,
    )
    for rank, lease_s in enumerate((3600.0, -1.0)):
        place = {"host": "h", "address": "127.0.0.1", "lease_s": lease_s}
        host.db.transact(part_ranks.claim, host.run_id, PROXY, rank, f"r{rank}", **place)
        host.db.transact(
            part_ranks.announce, host.run_id, PROXY, rank, f"r{rank}", 1, {"http": port if rank == 0 else 9}
        )
        host.db.transact(part_ranks.started, host.run_id, PROXY, rank, f"r{rank}", 1)
    host.finish_run()
    database = Counting(host.db)
    work = asyncio.create_task(host.runner(spec, database=database).run())
    await host.until(host.running)
    lease_s = host.ranks()[0].lease_s
    await host.until(lambda: host.ranks()[0].lease_s > lease_s)  # the runner goes on
    assert database.proxies_read == 0
    (host.folder / "go").touch()
    await work
    assert host.log() == "hello\n"
    assert database.proxies_read == 1
    proxy.close()


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


async def test_a_command_that_dies_is_started_again_until_the_part_is_given_up(host):
    spec = host.declare("print('no luck'); raise SystemExit(7)", max_restarts=2)
    await host.runner(spec).run()
    failure = host.db.query(part_ranks.order, host.run_id, PART).failure
    assert failure.startswith("part died 3 times, last with status 7: no luck (see ")
    assert [death["status"] for death in host.deaths()] == [7, 7, 7]
    await host.runner(spec).run()  # a scheduler that starts it again: it ends at once
    assert host.log().count("no luck") == 3


async def test_a_users_error_gives_the_part_up_at_once(host):
    spec = host.declare("print('agentrl: model: no such folder'); raise SystemExit(2)")
    await host.runner(spec).run()
    assert host.db.query(part_ranks.order, host.run_id, PART).failure == "model: no such folder"
    assert len(host.deaths()) == 1


async def test_a_part_that_is_to_stop_ends_its_command(host):
    spec = host.declare(SLEEP)
    work = asyncio.create_task(host.runner(spec).run())
    await host.until(host.running)
    guard = psutil.Process(host.ranks()[0].pid)
    host.stop()
    await work
    assert not guard.is_running()
    assert not host.ranks()[0].live
    assert host.deaths() == []


async def test_a_cancelled_runner_ends_its_command_and_releases_the_rank(host):
    spec = host.declare(SLEEP)
    work = asyncio.create_task(host.runner(spec).run())
    await host.until(host.running)
    guard = psutil.Process(host.ranks()[0].pid)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not guard.is_running()
    assert not host.ranks()[0].live


GANG = "import sys, time; print(*sys.argv[1:], flush=True); time.sleep(600)"
LEADER = ("{leader}:{leader_port:rdzv}", "{rank}")


async def test_a_gang_starts_with_its_leaders_address_and_starts_again_together_once(host):
    spec = host.declare(GANG, words=LEADER, ranks=2, gang=True, ports=("rdzv",))
    work = [asyncio.create_task(host.runner(spec, rank).run()) for rank in (0, 1)]
    await host.until(lambda: host.running(2) and host.log(0).count("\n") == host.log(1).count("\n") == 1)
    first = host.ranks()
    os.kill(first[1].pid, signal.SIGKILL)  # the guard: its command dies with it
    await host.until(lambda: [rank.attempt for rank in host.ranks()] == [2, 2] and host.running(2))
    second = host.ranks()
    assert {rank.pid for rank in first}.isdisjoint(rank.pid for rank in second)
    assert len(host.deaths()) == 1
    expected = [f"10.1.2.3:{ranks[0].ports['rdzv']}" for ranks in (first, second)]
    await host.until(lambda: host.log(0).count("\n") == host.log(1).count("\n") == 2)
    for rank in (0, 1):
        assert host.log(rank).split() == [expected[0], str(rank), expected[1], str(rank)]
    host.stop()
    await asyncio.gather(*work)


async def test_a_gang_waits_for_all_of_its_ranks(host):
    spec = host.declare(GANG, words=LEADER, ranks=2, gang=True, ports=("rdzv",))
    alone = asyncio.create_task(host.runner(spec, 1).run())
    await host.until(lambda: [rank.attempt for rank in host.ranks()] == [1])
    assert host.ranks()[0].state == "waiting"
    other = asyncio.create_task(host.runner(spec, 0).run())
    await host.until(lambda: host.running(2))
    host.stop()
    await asyncio.gather(alone, other)


async def test_a_lost_runner_of_a_gang_moves_the_gang_to_the_next_attempt(host):
    spec = host.declare(GANG, words=LEADER, ranks=2, gang=True, ports=("rdzv",))
    stays = asyncio.create_task(host.runner(spec, 0).run())
    host.db.transact(part_ranks.claim, host.run_id, PART, 1, "lost", host="gone", address="10.0.0.9", lease_s=3600.0)
    host.db.transact(part_ranks.announce, host.run_id, PART, 1, "lost", 1, {"rdzv": 1})
    await host.until(host.running)
    host.db.transact(part_ranks.renew, host.run_id, PART, 1, "lost", -1.0)  # its lease is over
    successor = asyncio.create_task(host.runner(spec, 1).run())
    await host.until(lambda: host.running(2) and [rank.attempt for rank in host.ranks()] == [2, 2])
    assert [(death["rank"], death["status"]) for death in host.deaths()] == [(1, None)]
    host.stop()
    await asyncio.gather(stays, successor)


class CutOff:
    """A database that this host cannot reach once `cut` is set."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.cut = False

    def query(self, *args: Any) -> Any:
        return self._asked(self._database.query, *args)

    def transact(self, *args: Any, **kwargs: Any) -> Any:
        return self._asked(self._database.transact, *args, **kwargs)

    def _asked(self, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.cut:
            raise StoreUnavailable("no route to host")
        return do(*args, **kwargs)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("fenced", [True, False])
async def test_a_fenced_command_ends_when_its_lease_cannot_be_renewed(host, fenced, monkeypatch):
    monkeypatch.setattr(rank_lease, "FENCED_AFTER_S", 0.5)
    spec = host.declare(SLEEP, fenced=fenced)
    database = CutOff(host.db)
    work = asyncio.create_task(host.runner(spec, database=database).run())
    await host.until(host.running)
    guard = psutil.Process(host.ranks()[0].pid)
    database.cut = True
    if fenced:
        with pytest.raises(StoreUnavailable):  # it cannot claim the rank again either: the scheduler repeats it
            await work
        assert not guard.is_running()
        return
    await asyncio.sleep(1.0)
    assert guard.is_running()
    database.cut = False
    host.stop()
    await work


async def test_a_runner_that_lost_its_rank_ends_its_command_and_waits(host):
    spec = host.declare(SLEEP)
    work = asyncio.create_task(host.runner(spec).run())
    await host.until(host.running)
    guard = psutil.Process(host.ranks()[0].pid)
    host.db.transact(_steal, host.run_id)
    await host.until(lambda: not guard.is_running())
    host.db.transact(part_ranks.release, host.run_id, PART, 0, "thief", 0)
    await host.until(host.running)
    host.stop()
    await work


def _steal(conn, run_id):
    rank = part_ranks.ranks(conn, run_id, PART)[0]
    part_ranks.release(conn, run_id, PART, 0, rank.runner, None)
    part_ranks.claim(conn, run_id, PART, 0, "thief", host="b", address="b", lease_s=3600.0)

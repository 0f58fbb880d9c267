"""The process group that a version is sent over. What engines do in it: tests/e2e/test_publish.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # its stubs leave them out

from agentrl.domain.schemas import Json
from agentrl.trainer.publish import tensor_broadcast
from agentrl.trainer.publish.tensor_broadcast import broadcast
from agentrl.trainer.weights.ownership import Output


@pytest.fixture(autouse=True)
def ended_senders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test waits for its senders, which print that no engine has joined."""
    monkeypatch.setattr(tensor_broadcast, "JOIN_TIMEOUT_S", 0.5)
    yield
    for thread in threading.enumerate():
        if thread.name == "weights-sender":
            thread.join(60)
            assert not thread.is_alive()


def test_an_absent_member_does_not_block_the_sender() -> None:
    """The block ends at once; the thread that waits for members ends by itself."""
    buckets, outputs = [{"a": torch.ones(2)}], [[Output("a", torch.float32, (2,))]]
    members: list[Json] = [{"url": "e", "ranks": 2}]
    with broadcast(buckets, outputs, members, device=torch.device("cpu"), timeout_s=1) as offer:
        assert offer["world_size"] == 3
        assert offer["buckets"] == [{"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}]


def test_an_absent_member_does_not_block_the_others() -> None:
    """They end when the trainer gives up, while the proxy still has to answer; then they read the folder."""
    buckets, outputs = [{"a": torch.ones(2)}], [[Output("a", torch.float32, (2,))]]
    members: list[Json] = [{"url": "e", "ranks": 1}, {"url": "absent", "ranks": 1}]
    problems: list[str] = []

    def join(offer: Json) -> None:
        wait, group = timedelta(seconds=120), offer["group"]
        store = TCPStore(offer["host"], offer["port"], 3, is_master=False, timeout=wait)
        try:
            named = PrefixStore("cpu/", PrefixStore(f"{group}/", PrefixStore(group, store)))
            dist.ProcessGroupGloo(named, 1, 3, timeout=wait)
        except RuntimeError as error:
            problems.append(str(error))

    with broadcast(buckets, outputs, members, device=torch.device("cpu"), timeout_s=1) as offer:
        member = threading.Thread(target=join, args=(offer,), daemon=True)
        member.start()
        member.join(60)
        assert len(problems) == 1


def test_the_rendezvous_listens_on_one_interface() -> None:
    members: list[Json] = [{"url": "http://e", "ranks": 1}]
    with broadcast([], [], members, device=torch.device("cpu"), timeout_s=1) as offer:
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [where.ip for where in listening if where.port == offer["port"]] == [offer["host"]]
        socket.create_connection((offer["host"], offer["port"]), timeout=5).close()

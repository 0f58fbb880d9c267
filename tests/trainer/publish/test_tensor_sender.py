"""Laying out, pickling and digesting the tensors of a version. What engines do with them: tests/e2e/test_publish.py."""

from __future__ import annotations

import base64
import hashlib
import os
import pickle
import socket
import subprocess
import sys
from itertools import pairwise

import hypothesis.strategies as st
import psutil
import torch
from hypothesis import given

from agentrl.domain.schemas import Json
from agentrl.trainer.publish import tensor_sender
from agentrl.trainer.publish.tensor_sender import digests, in_buckets, shared


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40))
def test_buckets_keep_the_order_and_are_as_large_as_they_may(sizes: list[int], room: int) -> None:
    tensors = {str(i): torch.zeros(size) for i, size in enumerate(sizes)}
    buckets = in_buckets(tensors, 4 * room)
    assert [name for bucket in buckets for name in bucket] == list(tensors)
    held = [[t.nbytes for t in bucket.values()] for bucket in buckets]
    assert all(sum(sizes) <= 4 * room or len(sizes) == 1 for sizes in held)
    assert all(sum(a) + b[0] > 4 * room for a, b in pairwise(held))


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def test_digests_are_of_what_engines_keep() -> None:
    q, k, v, up, head = (torch.randn(3, 2) for _ in range(5))
    norm, embedding = torch.randn(4), torch.randn(64, 2)
    layer = "model.layers.0"
    found = digests(
        {
            f"{layer}.self_attn.q_proj.weight": q,
            f"{layer}.self_attn.k_proj.weight": k,
            f"{layer}.self_attn.v_proj.weight": v,
            f"{layer}.mlp.up_proj.weight": up,
            "model.norm.weight": norm,
            "model.embed_tokens.weight": embedding,
            "lm_head.weight": head,
        }
    )
    assert found == {
        f"{layer}.self_attn.qkv_proj.weight": sha(q, k, v),
        "model.norm.weight": sha(norm),
        "model.embed_tokens.weight": sha(embedding),
    }


def test_what_is_of_another_type_than_the_engines_is_not_compared() -> None:
    """Engines may keep them in either."""
    tensors = {"a.weight": torch.ones(4, 4, dtype=torch.bfloat16), "norm.weight": torch.ones(4)}
    assert digests(tensors, torch.bfloat16) == {"a.weight": hashlib.sha256(b"\x80\x3f" * 16).hexdigest()[:16]}


READER = """
import base64, pickle, sys, torch
tensors = [t for text in sys.stdin.read().split() for t in pickle.loads(base64.b64decode(text))]
print([(name, str(t.dtype), t.sum().item()) for name, t in tensors])
"""


def test_another_process_reads_them_for_every_rank_of_every_member() -> None:
    tensors = {"a": torch.arange(7.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "c": torch.tensor(2.0)}
    members: list[Json] = [{"url": f"http://e{i}", "ranks": ranks} for i, ranks in enumerate((1, 2, 1, 1))]
    with shared(in_buckets(tensors, 40), members, timeout_s=5) as offer:
        for member in members:
            buckets = offer["payloads"][member["url"]]
            assert [len(payloads) for payloads in buckets] == [member["ranks"]] * 2
            for rank in range(member["ranks"]):
                said = subprocess.run(
                    [sys.executable, "-c", READER],
                    input="\n".join(payloads[rank] for payloads in buckets),
                    capture_output=True,
                    text=True,
                    check=True,
                )
                assert said.stdout.strip() == str(
                    [("a", "torch.float32", 21.0), ("b", "torch.bfloat16", 15.0), ("c", "torch.float32", 2.0)]
                )


OURS = f"torch_{os.getpid()}_"
"""How shared memory of this process is named: other processes have theirs in the same folder."""
PATIENT_READER = """
import base64, pickle, sys, torch
tensors = pickle.loads(base64.b64decode(sys.stdin.readline()))
print("mapped", flush=True)
sys.stdin.readline()
print(sum(t.sum().item() for _, t in tensors))
"""


def test_memory_that_nobody_read_is_given_back_and_a_reader_keeps_what_it_has() -> None:
    before = set(os.listdir("/dev/shm"))
    reader = subprocess.Popen(
        [sys.executable, "-c", PATIENT_READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    with shared([{"a": torch.ones(2)}, {"b": torch.ones(3)}], [{"url": "e", "ranks": 2}], timeout_s=5) as offer:
        assert len({name for name in os.listdir("/dev/shm") if name not in before and name.startswith(OURS)}) == 2
        reader.stdin.write(offer["payloads"]["e"][1][0] + "\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "mapped\n"
    assert not {name for name in os.listdir("/dev/shm") if name not in before and name.startswith(OURS)}
    said, errors = reader.communicate("\n")
    assert (said, reader.returncode) == ("3.0\n", 0), errors


def test_a_payload_is_a_plain_pickle_of_names_and_tensors() -> None:
    """What an engine unpickles is restricted."""
    with shared([{"a": torch.ones(2)}], [{"url": "e", "ranks": 1}], timeout_s=5) as offer:
        ((name, tensor),) = pickle.loads(base64.b64decode(offer["payloads"]["e"][0][0]))
    assert (name, tensor.tolist()) == ("a", [1.0, 1.0])


def test_who_does_not_come_holds_nobody_up() -> None:
    """The block ends at once; the thread that waits for members ends by itself."""
    with tensor_sender.broadcast(
        [{"a": torch.ones(2)}], [{"url": "e", "ranks": 2}], device=torch.device("cpu"), timeout_s=1
    ) as offer:
        assert offer["world_size"] == 3
        assert offer["buckets"] == [{"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}]


def test_the_rendezvous_listens_on_one_interface() -> None:
    members: list[Json] = [{"url": "http://e", "ranks": 1}]
    with tensor_sender.broadcast([], members, device=torch.device("cpu"), timeout_s=1) as offer:
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [where.ip for where in listening if where.port == offer["port"]] == [offer["host"]]
        socket.create_connection((offer["host"], offer["port"]), timeout=5).close()

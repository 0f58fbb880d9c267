"""Shared memory that other processes read. What engines do with it: tests/e2e/test_publish.py."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys

import torch

from agentrl.domain.schemas import Json
from agentrl.trainer.publish.tensor_sharing import shared

READER = """
import base64, pickle, sys, torch
for line in sys.stdin:
    tensors = [t for text in line.split() for t in pickle.loads(base64.b64decode(text))]
    print([(name, str(t.dtype), t.sum().item()) for name, t in tensors])
"""
"""Prints what it reads of each line, which has the payloads of one rank."""


def test_another_process_reads_the_tensors_for_every_rank_of_every_member() -> None:
    tensors = {"a": torch.arange(7.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "c": torch.tensor(2.0)}
    members: list[Json] = [{"url": f"http://e{i}", "ranks": ranks} for i, ranks in enumerate((1, 2, 1, 1))]
    with shared([{n: tensors[n] for n in names} for names in ("a", "bc")], members) as (payloads, problem):
        assert not problem
        lines = []
        for member in members:
            buckets = payloads[member["url"]]
            assert [len(of_ranks) for of_ranks in buckets] == [member["ranks"]] * 2
            lines += [" ".join(of_ranks[rank] for of_ranks in buckets) for rank in range(member["ranks"])]
        said = subprocess.run(
            [sys.executable, "-c", READER], input="\n".join(lines), capture_output=True, text=True, check=True
        )
    expected = [("a", "torch.float32", 21.0), ("b", "torch.bfloat16", 15.0), ("c", "torch.float32", 2.0)]
    assert said.stdout.splitlines() == [str(expected)] * 5


OURS = f"torch_{os.getpid()}_"
"""How shared memory of this process is named: other processes have theirs in the same folder."""
PATIENT_READER = """
import base64, pickle, sys, torch
tensors = pickle.loads(base64.b64decode(sys.stdin.readline()))
print("mapped", flush=True)
sys.stdin.readline()
print(sum(t.sum().item() for _, t in tensors))
"""


def test_unread_memory_is_freed_and_a_reader_keeps_its_mapping() -> None:
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
    with shared([{"a": torch.ones(2)}, {"b": torch.ones(3)}], [{"url": "e", "ranks": 2}]) as (payloads, _):
        assert len({name for name in os.listdir("/dev/shm") if name not in before and name.startswith(OURS)}) == 2
        reader.stdin.write(payloads["e"][1][0] + "\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "mapped\n"
    assert not {name for name in os.listdir("/dev/shm") if name not in before and name.startswith(OURS)}
    said, errors = reader.communicate("\n")
    assert (said, reader.returncode) == ("3.0\n", 0), errors


def test_a_payload_is_a_plain_pickle_of_names_and_tensors() -> None:
    """What an engine unpickles is restricted."""
    with shared([{"a": torch.ones(2)}], [{"url": "e", "ranks": 1}]) as (payloads, _):
        ((name, tensor),) = pickle.loads(base64.b64decode(payloads["e"][0][0]))
    assert (name, tensor.tolist()) == ("a", [1.0, 1.0])

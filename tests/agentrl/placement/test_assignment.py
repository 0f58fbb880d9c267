"""Each part gets GPUs of its own, on as few hosts as possible; what does not fit is refused in one line."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs.resources_config import Resources
from agentrl.errors import ConfigError
from agentrl.placement.assignment import Assignment, assign
from agentrl.placement.hosts import Host, like_hosts, visible_gpus
from agentrl.placement.plan_table import plan_lines


def placed(allocation: str, hosts: int, gpus: int) -> Assignment:
    resources = Resources.model_validate(allocation)
    return assign(resources, like_hosts(hosts, gpus), engines_on_gpu=True, trainer_on_gpu=True)


def shown(assignment: Assignment) -> list[str]:
    """`PART HOST:GPUS …`, a part a line, from the table that a user sees."""
    found: list[list[str]] = []
    for line in plan_lines(assignment)[1:]:
        cells = line.split()
        if not line.startswith(" "):
            found.append([cells[0]])
        found[-1].append(f"{cells[-2].removeprefix('host-')}:{cells[-1]}")
    return [" ".join(part) for part in found]


TABLE = [
    ("sglang:d1+fsdp:d1", 1, 2, "engine-0 0:0, trainer 0:1"),
    ("sglang:d2+fsdp:d2", 1, 4, "engine-0 0:2, engine-1 0:3, trainer 0:0,1"),
    (
        "sglang:d6+fsdp:d2",
        1,
        8,
        "engine-0 0:2, engine-1 0:3, engine-2 0:4, engine-3 0:5, engine-4 0:6, engine-5 0:7, trainer 0:0,1",
    ),
    ("sglang:d2t2+fsdp:d4", 1, 8, "engine-0 0:4,5, engine-1 0:6,7, trainer 0:0-3"),
    ("sglang:t4+fsdp:d4", 1, 8, "engine-0 0:0-3, trainer 0:4-7"),
    ("sglang:d4t2+fsdp:d8", 2, 8, "engine-0 1:0,1, engine-1 1:2,3, engine-2 1:4,5, engine-3 1:6,7, trainer 0:0-7"),
    ("sglang:d2t4+fsdp:d4t2", 2, 8, "engine-0 1:0-3, engine-1 1:4-7, trainer 0:0-7"),
    ("sglang:t8+fsdp:d8", 2, 8, "engine-0 0:0-7, trainer 1:0-7"),
    ("sglang:t16+fsdp:d8", 3, 8, "engine-0 0:0-7 1:0-7, trainer 2:0-7"),
    ("sglang:p2t8+fsdp:d16", 4, 8, "engine-0 0:0-7 1:0-7, trainer 2:0-7 3:0-7"),
    ("sglang:d2t16+fsdp:d32", 8, 8, "engine-0 4:0-7 5:0-7, engine-1 6:0-7 7:0-7, trainer 0:0-7 1:0-7 2:0-7 3:0-7"),
    ("sglang:d4+fsdp:d12", 2, 8, "engine-0 0:6, engine-1 0:7, engine-2 1:6, engine-3 1:7, trainer 0:0-5 1:0-5"),
    ("sglang:t8e4+fsdp:d8", 2, 8, "engine-0 0:0-7, trainer 1:0-7"),
    ("sglang:d4t2|fsdp:d8", 1, 8, "engine-0 0:0,1, engine-1 0:2,3, engine-2 0:4,5, engine-3 0:6,7, trainer 0:0-7"),
    ("sglang:d2t8|fsdp:d16", 2, 8, "engine-0 0:0-7, engine-1 1:0-7, trainer 0:0-7 1:0-7"),
    ("sglang:t16|fsdp:d16", 2, 8, "engine-0 0:0-7 1:0-7, trainer 0:0-7 1:0-7"),
    ("sglang.d2p1t1+d4p1t1", 1, 8, "engine-0 0:4, engine-1 0:5, trainer 0:0-3"),
    ("sglang[rollout]:d3+fsdp[actor]:d4", 1, 8, "engine-0 0:4, engine-1 0:5, engine-2 0:6, trainer 0:0-3"),
    ("sglang:t2+d2t2", 1, 8, "engine-0 0:4,5, trainer 0:0-3"),
    ("sglang:d3t4+fsdp:d8", 3, 8, "engine-0 1:0-3, engine-1 1:4-7, engine-2 2:0-3, trainer 0:0-7"),
]


@pytest.mark.parametrize(("allocation", "hosts", "gpus", "says"), TABLE, ids=[row[0] for row in TABLE])
def test_each_part_gets_its_gpus(allocation: str, hosts: int, gpus: int, says: str) -> None:
    assert ", ".join(shown(placed(allocation, hosts, gpus))) == says


@pytest.mark.parametrize(
    ("allocation", "hosts", "gpus", "message"),
    [
        (
            "sglang:d4t2+fsdp:d8",
            1,
            8,
            "resources need 16 GPUs (trainer 8, engine-0 2, engine-1 2, engine-2 2, …), but this host has 8",
        ),
        ("sglang:d1+fsdp:d1", 1, 0, "resources need 2 GPUs (engine-0 1, trainer 1), but this host has none"),
        ("sglang:t16+fsdp:d8", 2, 8, "resources need 24 GPUs (engine-0 16, trainer 8), but 2 hosts have 8 each"),
        (
            "sglang:d4t3+fsdp:d4",
            2,
            8,
            "resources: engine-3 needs 3 GPUs in equal shares of hosts; free are: host-0 1, host-1 2",
        ),
        (
            "sglang:t9+fsdp:d1",
            2,
            8,
            "resources: engine-0 needs 9 GPUs in equal shares of hosts; free are: host-0 8, host-1 8",
        ),
        (
            "sglang:d4|fsdp:d8",
            1,
            8,
            "resources: colocated parts need equally many GPUs: 4 × 1 of the engines, 8 of the trainer",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(allocation: str, hosts: int, gpus: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(allocation, hosts, gpus)
    assert str(caught.value) == message


@given(
    count=st.integers(1, 9),
    tensor=st.sampled_from([1, 2, 3, 4, 8, 16]),
    ranks=st.integers(1, 24),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_no_two_parts_get_one_gpu_and_each_gets_what_it_needs(
    count: int, tensor: int, ranks: int, sizes: list[int]
) -> None:
    resources = Resources.model_validate({"engines": {"count": count, "tensor": tensor}, "trainer": {"ranks": ranks}})
    hosts = [Host(f"host-{index}", tuple(map(str, range(gpus)))) for index, gpus in enumerate(sizes)]
    try:
        found = assign(resources, hosts, engines_on_gpu=True, trainer_on_gpu=True)
    except ConfigError:
        return
    assert [part.part for part in found.parts] == [*(f"engine-{index}" for index in range(count)), "trainer"]
    taken = Counter((share.host, gpu) for part in found.parts for share in part.shares for gpu in share.gpus)
    assert max(taken.values()) == (2 if found.colocated else 1)
    assert taken.keys() <= {(host.name, gpu) for host in hosts for gpu in host.gpus}
    for part in found.parts:
        shares = [len(share.gpus) for share in part.shares]
        assert sum(shares) == (ranks if part.part == "trainer" else tensor)
        assert len(set(shares)) == 1
        assert len(part.shares) == 1 or part.part == "trainer" or tensor > max(sizes)


@pytest.mark.parametrize(
    ("trainer", "hosts", "gpus", "says"),
    [
        ({"ranks": 6, "context": 3}, 3, 4, "trainer 0:0-2 1:0-2"),  # not three hosts with two GPUs each
        ({"ranks": 6, "tensor": 2}, 3, 4, "trainer 0:0,1 1:0,1 2:0,1"),
        ({"ranks": 16, "tensor": 2, "context": 8}, 4, 4, "trainer 0:0-3 1:0-3 2:0-3 3:0-3"),  # larger than a host
    ],
)
def test_a_context_group_stays_on_a_host_if_it_can(trainer: dict[str, int], hosts: int, gpus: int, says: str) -> None:
    resources = Resources.model_validate({"trainer": trainer})
    found = assign(resources, like_hosts(hosts, gpus), engines_on_gpu=True, trainer_on_gpu=True, engines=0)
    assert shown(found) == [says]


def test_parts_on_a_cpu_are_spread_over_the_hosts_and_get_no_gpu() -> None:
    resources = Resources.model_validate({"engines": {"count": 3}, "trainer": {"ranks": 2}})
    found = assign(resources, like_hosts(2, 8), engines_on_gpu=False, trainer_on_gpu=False)
    assert shown(found) == ["engine-0 0:CPU", "engine-1 1:CPU", "engine-2 0:CPU", "trainer 1:CPU"]


@pytest.mark.parametrize(
    ("sizes", "gpus", "says"),
    [
        ({}, 1, "engine-0 0:0, trainer 0:0"),
        ({}, 2, "engine-0 0:0, trainer 0:1"),
        ({"engines": {"tensor": 2}, "trainer": {"ranks": 2}}, 3, "engine-0 0:0,1, trainer 0:0,1"),
    ],
)
def test_parts_share_gpus_only_when_there_are_too_few(sizes: dict[str, Any], gpus: int, says: str) -> None:
    found = assign(Resources.model_validate(sizes), like_hosts(1, gpus), engines_on_gpu=True, trainer_on_gpu=True)
    assert ", ".join(shown(found)) == says


def test_engines_that_the_run_does_not_start_get_no_gpu() -> None:
    resources = Resources.model_validate({"engines": {"count": 8}, "trainer": {"ranks": 8}})
    found = assign(resources, like_hosts(1, 8), engines_on_gpu=True, trainer_on_gpu=True, engines=0)
    assert shown(found) == ["trainer 0:0-7"]


@pytest.mark.parametrize(
    ("visible", "count", "gpus"),
    [
        (None, 2, ("0", "1")),
        ("4, 6,7", 3, ("4", "6", "7")),
        ("GPU-8932f937,GPU-c70", 2, ("GPU-8932f937", "GPU-c70")),
        ("", 0, ()),
        ("0,1,9", 2, ("0", "1")),  # CUDA ignores what follows an unknown GPU
    ],
)
def test_gpus_are_named_as_cuda_visible_devices_names_them(
    visible: str | None, count: int, gpus: tuple[str, ...]
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(count, env) == gpus

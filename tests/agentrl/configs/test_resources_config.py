"""Resources in keys and as an allocation string say the same; what is not served is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.configs.resources_config import Resources
from agentrl.errors import ConfigError

BASE: dict[str, Any] = {"name": "r", "model": "tiny"}


def test_an_allocation_string_is_short_for_the_keys() -> None:
    short = parse_config(BASE | {"resources": "sglang:d4t2p2e2+fsdp:d4t2"}).resources
    assert short.engines.model_dump() == {"count": 4, "tensor": 2, "pipeline": 2, "data": 1, "experts": 2, "hosts": 1}
    trainer = {"ranks": 8, "replicas": 1, "tensor": 2, "context": 1, "experts": 1, "hosts": 1}
    assert short.trainer.model_dump() == trainer
    wide = parse_config(BASE | {"resources": "sglang:d4+fsdp:d2t2c2e4"}).resources.trainer
    assert (wide.ranks, wide.tensor, wide.context, wide.experts) == (8, 2, 2, 4)
    assert not short.colocated
    assert (short.engines.gpus, parse_config(BASE | {"resources": "sglang:d4|fsdp:d4"}).resources.colocated) == (
        4,
        True,
    )


def test_a_string_leaves_the_number_of_hosts_open() -> None:
    sizes = {"allocation": "sglang:d1t16+fsdp:d16", "engines": {"hosts": 2}, "trainer": {"hosts": 4}}
    found = parse_config(BASE | {"placement": "ray", "resources": sizes}).resources
    assert (found.engines.tensor, found.engines.hosts, found.trainer.ranks, found.trainer.hosts) == (16, 2, 16, 4)


def test_a_stored_configuration_has_the_string_and_the_keys() -> None:
    run = parse_config(BASE | {"resources": "sglang:d4t2+fsdp:d8"})
    assert parse_config(run.model_dump(mode="json")) == run


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        ("sglang:d4", "'sglang:d4' must name engines and a trainer once each, for example sglang:d4t2+fsdp:d8"),
        ("fsdp:d4+fsdp:d4", "must name engines and a trainer once each"),
        ("sglang:d4+fsdp:d4|fsdp:d4", "must name engines and a trainer once each"),
        ("sglng:d4+fsdp:d4", "there is no backend 'sglng'; did you mean 'sglang'?"),
        ("vllm:d4+fsdp:d4", "there is no backend 'vllm'"),
        ("sglang:d4+megatron:d4", "there is no backend 'megatron'"),
        ("sglang:d4+fsdp[critic]:d4", "not 'critic': critic and reference share the trainer's ranks"),
        ("sglang:d4c2+fsdp:d4", "sglang has no context parallel: c2; its sizes are d, t, p, e"),
        ("sglang:d4+fsdp:d4p2", "fsdp has no pipeline parallel: p2; its sizes are d, t, c, e"),
        ("sglang:d4+fsdp:d4e3", "experts 3 does not divide ranks / replicas = 4; 2 or 4 would"),
        ("sglang:d4x2+fsdp:d4", "sglang has no size 'x': x2; its sizes are d, t, p, e"),
        ("sglang:d0+fsdp:d4", "'sglang:d0': sizes are a letter and a number each"),
        ("sglang:d4d4+fsdp:d4", "sizes are a letter and a number each"),
        ("sglang:4+fsdp:d4", "sizes are a letter and a number each"),
        ("sglang:d4+", "'' in 'sglang:d4+' is not BACKEND:SIZES"),
        ("sglang:d4t2e4+fsdp:d4", "tensor 2 is not a multiple of experts 4"),
        ("d" * 201, "an allocation string has at most 200 characters"),
        ("sglang:d123456+fsdp:d4", "sizes are a letter and a number each"),
    ],
)
def test_an_unsupported_allocation_string_is_refused_in_one_line(allocation: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(BASE | {"resources": allocation})
    assert message in str(caught.value)
    assert str(caught.value).startswith("config key 'resources")
    assert "\n" not in str(caught.value)


def test_a_string_and_other_keys_must_agree() -> None:
    with pytest.raises(ConfigError, match="sets engines already"):
        parse_config(BASE | {"resources": {"allocation": "sglang:d4+fsdp:d4", "engines": {"count": 2}}})


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"ranks": 4, "replicas": 3}, "ranks 4 is not a multiple of replicas 3"),
        ({"ranks": 4, "replicas": 2, "tensor": 4}, "ranks 4 is not a multiple of replicas × tensor = 8"),
        ({"ranks": 8, "context": 3}, "context 3 does not divide ranks / .replicas × tensor. = 8; 2 or 4 would"),
        ({"ranks": 8, "tensor": 2, "context": 8}, "context 8 does not divide ranks / .replicas × tensor. = 4; 4 would"),
        ({"ranks": 8, "replicas": 2, "experts": 8}, "experts 8 does not divide ranks / replicas = 4; 4 would"),
        ({"ranks": 8, "tensor": 4, "experts": 2}, "replicas = 8 in multiples of tensor 4; 1 or 4 would"),
    ],
)
def test_ranks_are_shared_out_evenly(trainer: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Resources.model_validate({"trainer": trainer})

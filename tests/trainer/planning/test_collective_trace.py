"""How long messages take."""

from __future__ import annotations

import pytest

from agentrl.trainer.planning.collective_trace import EFFICIENCY, LATENCY_S, Route, Traffic, seconds

LINK, NETWORK = 450e9, 50e9


def taken(kind: str, ranks: int, hosts: int, size: float) -> float:
    return seconds({Route(kind, ranks, hosts, "shards"): Traffic(1, size)}, LINK, NETWORK, "shards") - LATENCY_S


def test_messages_inside_a_host_use_its_links() -> None:
    assert taken("all_gather", 8, 1, 8e9) == pytest.approx(7e9 / (LINK * EFFICIENCY))
    assert taken("all_reduce", 8, 1, 8e9) == pytest.approx(14e9 / (LINK * EFFICIENCY))


def test_all_gpus_of_a_host_carry_what_crosses_the_network() -> None:
    assert taken("all_gather", 64, 8, 64e9) == pytest.approx(64e9 * 7 / 8 / (8 * NETWORK * EFFICIENCY))
    assert taken("all_reduce", 8, 8, 8e9) == pytest.approx(2 * 8e9 * 7 / 8 / (NETWORK * EFFICIENCY))
    assert taken("all_to_all", 64, 8, 64e9) == pytest.approx(64e9 * 7 / 8 / (NETWORK * EFFICIENCY))


def test_only_the_kind_asked_for_counts_and_each_message_has_a_latency() -> None:
    traffic = {
        Route("all_gather", 2, 1, "shards"): Traffic(3, 0.0),
        Route("all_reduce", 2, 1, "tensors"): Traffic(1, 1e9),
    }
    assert seconds(traffic, LINK, NETWORK, "shards") == pytest.approx(3 * LATENCY_S)

"""Which settings a plan tries, and in which order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.planning.plan_settings import Setting, configured, may_fit, rescues, sharings

ASKED = Setting(64, 1, 1, 16384, "float32", False)


def test_replicas_grow_from_one_host_to_all_ranks() -> None:
    found = list(sharings(ASKED, 8))
    assert [(s.replicas, s.shards) for s in found] == [(8, 8), (4, 16), (2, 32), (1, 64)]
    assert {(s.dtype, s.checkpointing, s.tensor) for s in found} == {("bfloat16", True, 1)}


def test_rescues_begin_with_smaller_microbatches_and_end_with_the_hosts_memory() -> None:
    found = list(rescues(ASKED, 8, 3000))
    assert [s.budget for s in found] == [8192, 4096, 2048, 2048, 2048, 6000, 6000, 6000, 4096]
    assert [s.context for s in found] == [1, 1, 2, 4, 8, 1, 1, 1, 1]
    assert [s.tensor for s in found] == [1, 1, 1, 1, 1, 2, 4, 8, 1]
    assert [s.offload for s in found] == [False] * 8 + [True]


@given(
    ranks=st.sampled_from([1, 2, 4, 6, 8, 16, 24, 48, 512]),
    gpus=st.sampled_from([1, 2, 4, 8]),
    budget=st.integers(64, 10**6),
    longest=st.integers(16, 10**6),
)
def test_every_setting_is_a_valid_configuration(ranks: int, gpus: int, budget: int, longest: int) -> None:
    asked = Setting(ranks, 1, 1, budget, "float32", False)
    for setting in (*sharings(asked, gpus), *rescues(asked, gpus, longest)):
        assert setting.sizes.ranks == ranks
        assert configured(setting.config(TrainerConfig()), setting.sizes) == replace(setting, offload=False)
        assert setting.tensor <= gpus


def test_changes_name_the_keys_of_the_configuration() -> None:
    new = replace(ASKED, dtype="bfloat16", budget=4096)
    assert new.changes(ASKED) == {
        "trainer.dtype": ("float32", "bfloat16"),
        "trainer.tokens_per_microbatch": (16384, 4096),
    }


def test_state_that_exceeds_a_gpu_is_not_traced() -> None:
    assert may_fit(ASKED, 8e9, 8e9, 80 * 2**30)
    assert not may_fit(replace(ASKED, replicas=64), 8e9, 8e9, 80 * 2**30)
    assert may_fit(replace(ASKED, replicas=64, offload=True), 8e9, 8e9, 80 * 2**30)

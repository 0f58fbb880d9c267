"""Ranks that read their own parts of batches make the steps of one rank, also after one of them has died reading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batch_functions import trained
from loop_setup import Setup
from proxy_stub import ADMIN_KEY, play_groups
from ranks import run_ranks
from safetensors.torch import load_file  # noqa: F401 - before the ranks fork

from agentrl.store.training import steps
from agentrl.trainer.distributed import World
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.training_run import opened

NAMES = ("loss", "grad_norm", "reward/mean", "advantage/std", "length/total_mean", "tokens_trained", "off_policy/mean")


def measured(s: Setup) -> list[list[float]]:
    """NAMES of each step, whose digests are those of their batches."""
    with s.database.read() as conn:
        rows = steps.of_run(conn, s.run_id)
        assert [steps.batch(conn, row.id).digest() for row in rows] == [row.batch_digest for row in rows]
        return [[row.metrics[name] for name in NAMES] for row in rows]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, world: World) -> list[list[float]]:
    s = Setup(tmp_path_factory.mktemp("alone"), tiny_model, world)
    with s.proxy:
        assert s.train()
    found = measured(s)
    s.database.close()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_each_rank_reads_its_own_part(tmp_path: Path, setup: Setup, alone: list[list[float]], ranks: int) -> None:
    (tmp_path / "config.json").write_text(setup.config.model_dump_json())
    run_ranks("rank_batches.py", ranks, tmp_path, setup.proxy.url, "all")
    for ours, expected in zip(measured(setup), alone, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-7)
    read = [json.loads((tmp_path / f"read-{rank}.json").read_text()) for rank in range(ranks)]
    every = sorted(name for of_rank in read for name in of_rank)
    assert len(set(every)) == 3 * 2 * 3  # steps, groups, trajectories
    assert all(len(of_rank) < len(set(every)) for of_rank in read)


def test_functions_that_see_the_whole_batch_work_on_several_ranks(
    tmp_path: Path, setup: Setup, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, world: World
) -> None:
    one = Setup(tmp_path_factory.mktemp("one"), tiny_model, world)
    for s in (setup, one):
        play_groups(s.database, s.run_id, 6, seed=1)
    with one.proxy:
        publisher = Publisher(one.proxy.url, ADMIN_KEY, one.stop.wait)
        lineage = StoredLineage.begin(one.database, one.config)
        with opened(one.config, tiny_model, world, lineage, publisher, one.stop) as run:
            expected = trained(run)
    (tmp_path / "config.json").write_text(setup.config.model_dump_json())
    run_ranks("rank_batches.py", 2, tmp_path, setup.proxy.url, "ours")
    for rank in range(2):
        assert json.loads((tmp_path / f"losses-{rank}.json").read_text()) == pytest.approx(expected, rel=1e-5)
    refused = "select count(*) from groups where reject_reason = 'a third'"
    assert setup.query(refused) == one.query(refused) != [(0,)]
    one.database.close()


def test_a_rank_that_dies_while_it_reads_stops_the_others_and_the_run_goes_on(
    tmp_path: Path, setup: Setup, alone: list[list[float]]
) -> None:
    (tmp_path / "config.json").write_text(setup.config.model_dump_json())
    run_ranks("rank_batches.py", 2, tmp_path, setup.proxy.url, "dies")
    assert (tmp_path / "noticed-0").exists()
    run_ranks("rank_batches.py", 2, tmp_path, setup.proxy.url, "all")
    for ours, expected in zip(measured(setup), alone, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_an_error_of_one_rank_that_reads_is_the_error_of_all(tmp_path: Path, setup: Setup) -> None:
    (tmp_path / "config.json").write_text(setup.config.model_dump_json())
    run_ranks("rank_batches.py", 2, tmp_path, setup.proxy.url, "fails")
    assert [(tmp_path / f"failed-{rank}").read_text() for rank in (0, 1)] == ["the disk is full"] * 2

"""A run of a mixture: recorded experts reach the update, and its metrics say for how many tokens."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from loop_setup import Setup
from mixtures import random_experts, save_mixture
from sqlalchemy import select

from agentrl.domain.experts.routed_experts import CallRouting, RouteOrigin
from agentrl.store.calls import call_routing
from agentrl.store.db import bulk, codec
from agentrl.store.tables import interaction_data, interactions
from agentrl.store.training import steps
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.batch_metrics import origins_read, routing_metrics

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def record(setup: Setup) -> None:
    """Experts for every second position of first calls, and for all of their continuations, which compute the last two
    positions before them again.
    """
    rng = np.random.default_rng(0)
    with setup.database.write() as conn:
        calls = conn.execute(select(interactions, interaction_data).join(interaction_data).order_by(interactions.c.id))
        ends: dict[str, int] = {}
        for row in calls.all():
            before = ends.get(row.parent_id, 0)
            own = len(codec.unpack_ids(row.prompt_delta_ids)) + len(codec.unpack_ids(row.output_ids))
            end, start = before + own, max(0, before - 1)
            ends[row.id] = end
            count = end - 1 - start
            origins = [n % 2 if row.parent_id is None else RouteOrigin.RECORDED for n in range(count)]
            routing = CallRouting(
                start=start, computed_from=max(0, start - 2), experts=random_experts(rng, count, origins)
            )
            bulk.run(conn, call_routing.INSERT, [call_routing.row(row.id, routing)])


@pytest.fixture
def mixture_run(tmp_path: Path, world: World):
    made = Setup(tmp_path, save_mixture(tmp_path / "mixture"), world, steps=2)
    with made.proxy:
        yield made
    made.database.close()


def test_a_step_replays_what_was_recorded(mixture_run: Setup) -> None:
    record(mixture_run)
    assert mixture_run.train(routing_replay="engine", router_aux_loss_coef=0.01)
    for row in mixture_run.database.query(steps.of_run, mixture_run.run_id):
        batch = mixture_run.database.query(steps.batch, row.id)
        assert batch.digest() == row.batch_digest
        counts = dict.fromkeys(RouteOrigin, 0)
        for t in batch.trajectories:
            last = np.flatnonzero(t.loss_mask)[-1]
            for origin in t.routed.origins[:last]:
                counts[RouteOrigin(origin)] += 1
        tokens = row.metrics["routing/tokens"]
        assert tokens == sum(counts.values())
        for origin, count in counts.items():
            assert count
            assert row.metrics[f"routing/{origin.name.lower()}"] == pytest.approx(count / tokens)
    made = {name for name in row.metrics if name.startswith("rout")}
    table = PAGE.read_text().partition("## Of mixtures of experts")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert made == {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_without_records_every_token_counts_as_missing(mixture_run: Setup) -> None:
    assert mixture_run.train(routing_replay="engine")
    row = mixture_run.database.query(steps.of_run, mixture_run.run_id)[0]
    assert row.metrics["routing/missing"] == 1
    assert row.metrics["routing/tokens"] > 0
    assert "router_aux_loss" not in row.metrics


def test_a_batch_without_loss_tokens_has_no_tokens_to_replay(mixture_run: Setup) -> None:
    batch = mixture_run.database.query(_first_batch, mixture_run)
    for t in batch.trajectories:
        t.loss_mask[:] = False
    counts = origins_read(batch.trajectories)
    assert routing_metrics({origin: counts[origin.name] for origin in RouteOrigin}) == {
        "routing/tokens": 0.0,
        "routing/missing": 0.0,
        "routing/recorded": 0.0,
        "routing/recomputed": 0.0,
    }


def _first_batch(conn, setup: Setup):
    from agentrl.store.training import trainer_epochs

    epoch = trainer_epochs.begin_epoch(conn, setup.run_id)
    step_id = steps.lease(conn, setup.run_id, epoch, step=1, n_groups=2, max_staleness=9, discount=1.0)
    return steps.batch(conn, step_id)

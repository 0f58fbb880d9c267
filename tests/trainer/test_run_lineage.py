"""Rank 0's lineage does everything that the loop asks of a lineage."""

from __future__ import annotations

from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.stored_lineage import StoredLineage


def test_rank_0_inherits_no_method_that_does_nothing() -> None:
    asked = {name for name in vars(Lineage) if not name.startswith("__")}
    assert asked
    assert asked <= vars(StoredLineage).keys()

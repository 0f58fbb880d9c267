"""The batch of a traced step fills its microbatches."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.trainer.packing import make_units, plan
from agentrl.trainer.planning.workload import SMALLEST, Workload, filling_samples


@given(
    tokens=st.integers(16, 300),
    prompt=st.integers(1, 200),
    budget=st.integers(16, 1500),
    count=st.integers(1, 6),
)
def test_each_group_is_one_microbatch_filled_to_its_budget(tokens: int, prompt: int, budget: int, count: int) -> None:
    assume(prompt <= tokens - SMALLEST)
    samples = filling_samples(Workload(tokens, prompt, 8, 4), budget, count, 1000)
    units = make_units(samples, max(budget, tokens))
    assert len(units) == count
    for unit in units:
        assert budget - SMALLEST <= unit.size <= max(budget, tokens - 1)
    (minibatch,) = plan(units, ranks=1, minibatches=1, budget=max(budget, tokens))
    assert sum(map(len, minibatch[0])) == count

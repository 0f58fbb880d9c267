"""The text of a plan: a table, a verdict, the engines, and what to paste into the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from agentrl.configs.run_config import RunConfig
from agentrl.trainer.metrics.devices import labelled
from agentrl.trainer.planning.collective_trace import Route, Traffic
from agentrl.trainer.planning.engine_memory import EngineMemory
from agentrl.trainer.planning.memory_trace import Holds, Peak
from agentrl.trainer.planning.plan_settings import Setting
from agentrl.trainer.planning.plan_text import plan_json, plan_text, snippet
from agentrl.trainer.planning.run_plan import EnginePlan, RunPlan, Tried
from agentrl.trainer.planning.step_estimate import Cluster, Estimate
from agentrl.trainer.planning.workload import Workload

GIB = 2**30
DISK = 2e9
SMALL = Setting(ranks=8, replicas=1, tensor=1, budget=16384, dtype="bfloat16", checkpointing=False)
SAVING = replace(SMALL, checkpointing=True, budget=8192, offload=True, context=2)
GATHERS = {
    Route("all_gather", 8, 1, "shards"): Traffic(58, 120e9),
    Route("all_reduce", 8, 1, "tensors"): Traffic(2, 3e9),
}
FITTING = Estimate(
    peak=Peak({Holds.PARAMETERS: 4 * GIB, Holds.MOMENTS: 8 * GIB, Holds.ACTIVATIONS: 20 * GIB}),
    part="the last backward pass",
    needed=40.0 * GIB,
    available=80.0 * GIB,
    host_bytes=0.0,
    microbatches=3,
    seconds=150.0,
    waiting=1.25,
    flops=1e15,
    traffic=GATHERS,
    mfu=0.42,
)
TOO_LARGE = replace(FITTING, needed=92.5 * GIB)


def plan(asked: Tried, proposed: Tried | None = None, **others: Any) -> RunPlan:
    engines = EnginePlan(
        count=4, tensor=2, memory=EngineMemory(7.5 * GIB, 65536.0, 400_000), running=None, colocated=True
    )
    made = RunPlan(
        model="Qwen3-8B",
        shape={},
        layers=36,
        parameters=8.19e9,
        trained=8.19e9,
        cluster=Cluster(labelled("H100-80"), 8, 1),
        work=Workload(tokens=8192, prompt=1024, group_size=8, groups=16),
        asked=asked,
        proposed=proposed,
        tried=[asked, *([proposed] if proposed else [])],
        engines=engines,
        publish_bytes=16.4e9,
        checkpoint_bytes=98.3e9,
        packed=True,
    )
    return replace(made, **others)


def lines(made: RunPlan) -> dict[str, str]:
    """The rest of each line, by its first words."""
    split = (line.strip().partition("  ") for line in plan_text(made, DISK))
    return {first: rest.strip() for first, _, rest in split}


def test_a_setting_that_fits_is_a_table_and_a_verdict() -> None:
    made = plan(Tried(SMALL, FITTING))
    text, found = plan_text(made, DISK), lines(made)
    assert text[0] == "Qwen3-8B: 8.19B parameters in 36 layers, 8.19B trained; 1 × 8 H100-80"
    assert text[1] == "step: 16 groups of 8 trajectories of 8,192 tokens, 1,024 of them a shared prompt"
    assert found["ranks × tensor, replicas"] == "8 × 1, 1"
    assert (found["parameters"], found["AdamW's moments"], found["logits"]) == ("4.0 GiB", "8.0 GiB", "0.0 GiB")
    assert found["peak, with driver and gaps"] == "40.0 of 80.0 GiB"
    assert found["microbatches of a step"] == "3 × 16,384"
    assert (found["step at best"], found["waiting for collectives"]) == ("2.5 min", "1.25 s")
    assert (found["arithmetic of the peak (MFU)"], found["moved between GPUs"]) == ("42%", "123 GB in 60")
    assert "as configured: fits" in text
    assert (
        "engines: 4 of 2 GPUs on the trainer's GPUs, in turns; each caches 400,000 tokens (64 KiB each on a GPU): "
        "192 episodes at once"
    ) in text
    assert "checkpoint: 98.3 GB, 49.1 s at 2 GB/s a host; published each step: 16.4 GB to each engine" in text
    assert not any(line.startswith("to paste") for line in text)


def test_a_proposal_says_what_it_changes_and_can_be_pasted() -> None:
    made = plan(Tried(SMALL, TOO_LARGE), Tried(SAVING, FITTING))
    text = plan_text(made, DISK)
    assert "as configured: does not fit, 12.5 GiB too much" in text
    (how,) = [line for line in text if line.startswith("fits with ")]
    assert "trainer.activation_checkpointing: true (was false)" in how
    assert "trainer.tokens_per_microbatch: 8192 (was 16384)" in how
    assert text[text.index("to paste into the config:") + 2 :] == snippet(made)
    pasted = yaml.safe_load("\n".join(snippet(made)))
    config = RunConfig(name="r", model="m", agent="a:B", tasks="t.jsonl", **pasted)
    assert (config.resources.trainer.ranks, config.resources.trainer.context) == (8, 2)
    assert (config.trainer.cpu_offload, config.trainer.activation_checkpointing) == (True, True)
    assert config.resources.colocated is True


def test_a_faster_setting_is_proposed_beside_one_that_fits() -> None:
    text = plan_text(plan(Tried(SMALL, FITTING), Tried(replace(SMALL, budget=32768), FITTING)), DISK)
    assert "faster with trainer.tokens_per_microbatch: 32768 (was 16384)" in text


def test_where_nothing_fits_the_nearest_setting_is_named() -> None:
    made = plan(
        Tried(SMALL, TOO_LARGE), tried=[Tried(SMALL, TOO_LARGE), Tried(SAVING, replace(TOO_LARGE, needed=85.0 * GIB))]
    )
    text = plan_text(made, DISK)
    assert "none of 2 settings fits: more GPUs, or GPUs with more memory, are needed" in text
    assert "nearest: 8 ranks, context 2, 8192 tokens, bfloat16, checkpointing, offload needs 85.0 GiB" in text


def test_a_refused_setting_has_no_figures() -> None:
    made = plan(Tried(SMALL, refused="8 ranks do not divide 6 heads"))
    assert "as configured: refused: 8 ranks do not divide 6 heads" in plan_text(made, DISK)
    assert lines(made)["step at best"] == "-"
    assert plan_json(made, DISK)["asked"]["refused"] == "8 ranks do not divide 6 heads"


def test_engines_without_room_and_models_that_are_not_packed_are_told() -> None:
    full = EnginePlan(count=1, tensor=1, memory=EngineMemory(90.0 * GIB, 65536.0, 0), running=None, colocated=False)
    text = plan_text(plan(Tried(SMALL, FITTING), engines=full, packed=False, parameters=950.0, trained=1.5e6), DISK)
    assert "engines: the weights, 90.0 GiB on each GPU, do not fit beside what else is there" in text
    assert "the trainer computes this model's sequences one by one: shared prompts are computed again" in text
    assert text[0].startswith("Qwen3-8B: 950 parameters in 36 layers, 1.5M trained")


def test_the_json_has_the_figures_of_both_settings() -> None:
    made = plan(Tried(SMALL, TOO_LARGE), Tried(SAVING, FITTING))
    found = plan_json(made, DISK)
    assert (found["asked"]["fits"], found["proposed"]["fits"], len(found["tried"])) == (False, True, 2)
    assert found["checkpoint_s"] == 98.3e9 / DISK
    assert found["proposed"]["collectives"][0] == {
        "kind": "all_gather",
        "ranks": 8,
        "hosts": 1,
        "of": "shards",
        "messages": 58,
        "bytes": 120e9,
    }
    assert yaml.safe_load(found["yaml"])["trainer"]["cpu_offload"] is True

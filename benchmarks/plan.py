"""Plans known models on 8, 64 and 512 GPUs, and compares the plan's peak memory with memory measured on the CPU.

    python benchmarks/plan.py --out benchmarks/results/plan.json
    python benchmarks/plan.py --out FILE.json --models Qwen3-8B --gpus 8

Traces run one after another; each is written as soon as it is made, and a second run with the same file makes only what
is missing. A plan takes half a minute of one core.

- `validation/CASE`: predicted over measured peak of one step on one or two ranks (tests/trainer/memory_cases.py).
- `needed/MODEL/GPUS`: GiB of one GPU that a step needs, with the driver and gaps: bfloat16, activation checkpointing, a
  microbatch of 16,384 tokens, trajectories of 8,192. The trainer has all GPUs; a replica has the fewest whose memory
  its parameters, gradients and moments half fill. Where these alone do not fit, nothing is traced.
- `microbatch_s/MODEL/GPUS`: seconds of a microbatch by roofline; `waiting_s`: of these, waiting for collectives.
- `moved_gb/MODEL/GPUS`: GB of a rank's messages in a microbatch.

- `…/experts-E`: the same with experts shared by E ranks and microbatches of 8,192 tokens.

Notes have the peaks by what they hold, and the messages by kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

from agentrl.configs.run_config import RunConfig
from agentrl.trainer.metrics.devices import labelled
from agentrl.trainer.planning.model_shapes import SHAPES
from agentrl.trainer.planning.plan_settings import STATE_BYTES, Setting
from agentrl.trainer.planning.plan_text import tried_json
from agentrl.trainer.planning.run_plan import Tracer
from agentrl.trainer.planning.shape_folder import on_meta
from agentrl.trainer.planning.step_estimate import Cluster
from agentrl.trainer.planning.workload import Workload

MODELS = ("Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "1T-mixture")
GPUS = (8, 64, 512)
DEVICE = labelled("H100-80")
HOST = 8
BUDGET = 16384
EXPERTS = (("Qwen3-235B-A22B", 64, 8), ("1T-mixture", 512, 16), ("1T-mixture", 512, 64))
"""Model, GPUs, ranks that share its experts: what FSDP alone does not fit, with microbatches of half the tokens."""
WORK = Workload(tokens=8192, prompt=1024, group_size=8, groups=1)
GIB, GB = 2**30, 1e9
TESTS = Path(__file__).parents[1] / "tests" / "trainer"


def shards(parameters: float, ranks: int) -> int:
    """Ranks of one replica: the fewest whose memory parameters, gradients and moments half fill."""
    count = min(HOST, ranks)
    while count < ranks and STATE_BYTES * parameters / count > DEVICE.memory_bytes / 2:
        count *= 2
    return count


def planned(model: str, gpus: int, experts: int = 1) -> dict[str, Any]:
    """One row of the table. With `experts`, one replica over all GPUs."""
    parameters = sum(p.numel() for p in on_meta(SHAPES[model]).parameters())
    sharing = shards(parameters, gpus) if experts == 1 else gpus
    row: dict[str, Any] = {"model": model, "gpus": gpus, "parameters": parameters, "shards": sharing}
    state = STATE_BYTES * parameters / sharing
    if state > DEVICE.memory_bytes:
        return row | {"state_bytes": state, "fits": False}
    cluster = Cluster(DEVICE, HOST, max(1, gpus // HOST))
    run = RunConfig(name="plan", model=model)
    budget = BUDGET if experts == 1 else BUDGET // 2
    setting = Setting(gpus, gpus // sharing, 1, budget, "bfloat16", True, experts=experts)
    tried = Tracer(SHAPES[model], run, cluster, WORK, print).tried(setting)
    return row | tried_json(tried)


def validated() -> dict[str, float]:
    """Predicted over measured peak of every case. In processes of their own, as tests run them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TESTS / "validate_memory.py"), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = harness.arguments(
        __doc__,
        models=(str, ",".join(MODELS), "models, with commas between them"),
        gpus=(str, ",".join(map(str, GPUS)), "numbers of GPUs"),
        validation=(int, 1, "0: plan only, and keep the validation of the file"),
    )
    rows: dict[str, dict[str, Any]] = {}
    ratios: dict[str, float] = {}
    if options.out and options.out.exists():
        known = json.loads(options.out.read_text())["notes"]
        rows, ratios = known.get("rows", {}), known.get("validation", {})
    for gpus in map(int, options.gpus.split(",")):
        for model in options.models.split(","):
            if f"{model}/{gpus}" not in rows:
                rows[f"{model}/{gpus}"] = planned(model, gpus)
                written(rows, ratios, options.out)
    for model, gpus, experts in EXPERTS:
        name = f"{model}/{gpus}/experts-{experts}"
        if name not in rows and model in options.models and str(gpus) in options.gpus:
            rows[name] = planned(model, gpus, experts)
            written(rows, ratios, options.out)
    if options.validation:
        ratios = validated()
    written(rows, ratios, options.out).show()


def written(rows: dict[str, dict[str, Any]], ratios: dict[str, float], out: Path | None) -> harness.Report:
    """The report of what is known, written when a file is asked for."""
    report = harness.Report("plan")
    report.notes = {"device": DEVICE.label, "budget": BUDGET, "validation": ratios, "rows": rows}
    for name, ratio in ratios.items():
        report.add(f"validation/{name}", [ratio], "predicted / measured")
    for name, row in rows.items():
        if "needed_bytes" not in row:
            continue
        report.add(f"needed/{name}", [row["needed_bytes"] / GIB], "GiB")
        report.add(f"microbatch_s/{name}", [row["step_s"]], "s")
        report.add(f"waiting_s/{name}", [row["waiting_s"]], "s")
        report.add(f"moved_gb/{name}", [sum(c["bytes"] for c in row["collectives"]) / GB], "GB")
    if out is not None:
        report.write(out)
    return report


if __name__ == "__main__":
    main()

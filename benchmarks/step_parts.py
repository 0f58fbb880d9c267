"""Measures the parts of a trainer's step at SmolLM2-135M's size, and what is neither a forward nor a backward pass.

    python benchmarks/step_parts.py --out benchmarks/results/step_parts.json --before FOLDER

A step leases its batch from a SQLite store, reads it, computes advantages, and updates all parameters in two
minibatches; it is not saved. The weights are random. All variants have the same batch: groups of 4 trajectories of
--tokens tokens.

- `seconds/VARIANT`: a step, with `prepare_batch` and `update`. `overhead/VARIANT`: the share of it outside of forward
  and backward passes, the optimizer included.
- `part/VARIANT/PART`: seconds of lease (`prepare`), passes without and with gradient (`recompute`, `forward`),
  `backward`, AdamW (`step`) and the rest of `update` (`other`).
- `time/…`: the same step as its metrics have it, of this commit.

VARIANT is `shares`, this commit, or `before`, the package in the folder `--before`: a checkout of an earlier commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from batch_reads.filled_batch import Size, config_of, fill
from training.models import save_random_model

from agentrl.store import Database

HERE = Path(__file__).parent
PARTS = ("prepare", "recompute", "forward", "backward", "step")


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        rounds=(int, 3, "steps of each variant, after one that warms up"),
        groups=(int, 2, "groups of a step"),
        tokens=(int, 128, "of a trajectory, a multiple of 16"),
        tiny=(int, 0, "1: a tiny model"),
        before=(str, "", "folder of an earlier commit"),
    )
    report = harness.Report("step_parts")
    variants = ({"before": options.before} if options.before else {}) | {"shares": str(HERE.parent)}
    size = Size(options.groups, 4, options.tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_random_model(folder / "model", tiny=bool(options.tiny))
        for variant, package in variants.items():
            taken = steps_of(package, folder / variant, size, model, options.rounds)
            base = "seconds/before" if options.before and variant != "before" else None
            report.add(f"seconds/{variant}", [t["seconds"] for t in taken], "s", base)
            passes = [t.get("recompute", 0.0) + t["forward"] + t["backward"] for t in taken]
            shares = [1 - p / t["seconds"] for p, t in zip(passes, taken, strict=True)]
            report.add(f"overhead/{variant}", [100 * share for share in shares], "%")
            for part in PARTS:
                report.add(f"part/{variant}/{part}", [t.get(part, 0.0) for t in taken], "s")
            rest = [t["seconds"] - sum(t.get(part, 0.0) for part in PARTS) for t in taken]
            report.add(f"part/{variant}/other", rest, "s")
            if variant == "shares":
                for key in sorted(key for key in taken[0] if key.startswith("time/")):
                    report.add(key, [t[key] for t in taken], "s")
            report.notes[f"loss/{variant}"] = taken[0]["loss"]
    harness.finish(report, options.out)


def steps_of(package: str, folder: Path, size: Size, model: Path, rounds: int) -> list[dict[str, float]]:
    """The steps of one variant, in a process and with a store of its own."""
    folder.mkdir()
    config = config_of(size, str(folder), minibatches=2, tokens_per_microbatch=1024, train_layers=None)
    (folder / "config.json").write_text(config.model_dump_json(exclude_unset=True))
    database = Database(f"sqlite:///{folder}/store.db")
    database.upgrade()
    fill(database, size, config, vocabulary=json.loads((model / "config.json").read_text())["vocab_size"])
    database.close()
    asked = [database.url, folder / "config.json", model, rounds + 1]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "batch_reads" / "one_step.py"), *map(str, asked)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd="/",
        env=os.environ | {"PYTHONPATH": os.pathsep.join([package, str(HERE)])},
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines[1:]]


if __name__ == "__main__":
    main()

"""Measures a training step against TRL's GRPO trainer and a plain padded loop, on the same trajectories.

    python benchmarks/trainer.py --out benchmarks/results/trainer.json
    python benchmarks/trainer.py --quick
    python benchmarks/trainer.py --device cuda --model FOLDER

A step takes a batch of 8 or 16 trajectories (64 on a GPU) in two minibatches: it recomputes all logprobs without
gradient. Then it runs forward, backward and an AdamW step for each minibatch. Every variant has the same trajectories,
minibatches, objective, parameters (all are trained), numeric type, threads and token budget of a forward pass. Each
variant runs in its own process. The weights are random, in SmolLM2-135M's shape, unless a model folder is given.

- `tokens_per_s/SHAPE/VARIANT`: tokens of the trajectories, padding not counted, over the seconds of a step. Shapes:
  `even` lengths; `tails`, outputs of log-normal lengths; `shared`, groups that share a long prompt (the other shapes
  share none).
- `theory/SHAPE`: the tokens of TRL's padded batch over the necessary tokens (a shared prompt once, none after the last
  prediction). `of_theory/SHAPE/VARIANT`: our speed over the variant's speed, divided by this ratio.
- `peak_memory/SHAPE/VARIANT`: of the whole process (resident), on a GPU what torch allocated.
- `time/SHAPE/VARIANT/PHASE`: the wall time of a step by phase.
- `ranks/N`: tokens per second of N ranks of one thread each (of one GPU each), shape `even`; `2_kept`: with
  `trainer.keep_gathered`.
- `mfu/SHAPE/VARIANT`, on a GPU: operations of the necessary matrix products over the device's peak in the same time.

docs/trainer-benchmark.md says how each variant is set up.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from training.batches import ON_GPU, QUICK, SHAPES, Counts, count, make_samples
from training.clock import PHASES
from training.models import save_random_model
from training.worker import VARIANTS, WARM_UP, Order

from agentrl.trainer.metrics.flops import matmul_flops, peak_flops

HERE = Path(__file__).parent
BASE = "trl"
RANKS = "ranks"
"""The name among the shapes that measures the scaling over ranks."""
TIMED = ("agentrl", "trl")
"""The variants whose time is measured by phase."""
MINIBATCHES = 2
ENOUGH_S = 150.0
"""Seconds of a shape's rounds after which no further round is run."""
MIB = 2**20


def main() -> None:
    """Measure, print a table, write JSON."""
    options = arguments()
    report = harness.Report("trainer")
    shapes = QUICK if options.quick else (ON_GPU if options.device == "cuda" else SHAPES)
    with tempfile.TemporaryDirectory() as name:
        model = options.model or save_random_model(Path(name), tiny=options.quick)
        config = json.loads((model / "config.json").read_text())
        order = Order(
            "",
            str(model),
            shapes["even"],
            options.budget,
            MINIBATCHES,
            options.device,
            options.threads,
            options.device == "cuda",
        )
        report.notes |= about(order, config, options)
        for shape in (shape for shape in options.shapes if shape != RANKS):
            measure(report, shape, replace(order, shape=shapes[shape]), config, options)
        if RANKS in options.shapes and (options.device == "cpu" or torch.cuda.device_count() > 1):
            scale(report, order, config, options)
    harness.finish(report, options.out)


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each figure, after one that warms up (3)")
    parser.add_argument("--quick", action="store_true", help="one round with a tiny model and short trajectories")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda computes in bfloat16 (cpu)")
    parser.add_argument("--model", type=Path, help="folder of a causal language model, in place of random weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each process (all cores)")
    parser.add_argument("--budget", type=int, help="tokens of one forward pass (1024; 16384 on a GPU)")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS), help="only these")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=[*SHAPES, RANKS], help="only these")
    parser.add_argument("--cpu-time", action="store_true", help="not wall time: for busy machines")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU in bfloat16, for MFU (known for some)")
    options = parser.parse_args()
    for wanted, known in ((options.variants, VARIANTS), (options.shapes, (*SHAPES, RANKS))):
        if unknown := set(wanted) - set(known):
            parser.error(f"no {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    if options.quick:
        options.rounds = 1
    if options.cpu_time and (options.threads != 1 or options.device != "cpu"):
        parser.error("--cpu-time: threads that wait for each other take CPU time too: --threads 1, on a CPU")
    if options.device == "cuda":
        options.variants = [v for v in options.variants if not v.endswith("_tuned")]  # tuned for a CPU
    options.budget = options.budget or (16384 if options.device == "cuda" else 128 if options.quick else 1024)
    return options


def about(order: Order, config: dict[str, Any], options: argparse.Namespace) -> dict[str, object]:
    """The notes of the report."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    shape = {key: config[key] for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    return {
        "device": device,
        "type": "bfloat16, float32 master weights" if order.bfloat16 else "float32",
        "threads": order.threads,
        "clock": "CPU time" if options.cpu_time else "wall time",
        "model": {"folder": order.model} if options.model else shape,
        "minibatches": order.minibatches,
        "budget": order.budget,
    }


def measure(
    report: harness.Report, name: str, order: Order, config: dict[str, Any], options: argparse.Namespace
) -> None:
    """Measure all figures of one shape; its variants take turns, round by round."""
    counts = count(make_samples(order.shape, config["vocab_size"]), order.minibatches, order.budget)
    with ExitStack() as stack:
        workers = {v: stack.enter_context(running(replace(order, variant=v))) for v in options.variants}
        settings = {v: worker.hear() for v, worker in workers.items()}
        report.notes[name] = {
            "shape": repr(order.shape),
            "counts": repr(counts),
            "settings": settings,
        }
        answers = take_turns(name, workers, options.rounds, options.device == "cpu")
    seconds = "cpu_seconds" if options.cpu_time else "seconds"
    speeds = {v: [counts.tokens / a[seconds] for a in taken] for v, taken in answers.items()}
    base = BASE if BASE in speeds else next(iter(speeds))
    report.compare(f"tokens_per_s/{name}", speeds, "tokens/s", base)
    theory = counts.padded / counts.distinct
    report.add(f"theory/{name}", [theory], "×")
    for peer in ("trl", "trl_tuned"):
        if peer in speeds and "agentrl" in speeds:
            ratios = [ours / theirs / theory for ours, theirs in zip(speeds["agentrl"], speeds[peer], strict=True)]
            report.add(f"of_theory/{name}/{peer}", ratios, "×")
    memory = {v: [a["peak_bytes"] / MIB for a in taken] for v, taken in answers.items()}
    report.compare(f"peak_memory/{name}", memory, "MiB", base)
    for v in TIMED:
        for phase in PHASES if v in answers else ():
            report.add(f"time/{name}/{v}/{phase}", [a["phases"].get(phase, 0.0) for a in answers[v]], "s")
    if options.device == "cuda":
        add_mfu(report, name, answers, counts, config, options)


def take_turns(
    name: str, workers: dict[str, Worker], rounds: int, small_warm_up: bool
) -> dict[str, list[dict[str, Any]]]:
    """Run the rounds; returns the answers of each variant without the first, which is a warm-up."""
    answers: dict[str, list[dict[str, Any]]] = {v: [] for v in workers}
    spent = 0.0
    for round_ in range(-1, rounds):
        if spent > ENOUGH_S and round_ > 0:
            break
        for v, worker in workers.items():
            answer = worker.step(WARM_UP if small_warm_up and round_ < 0 else "")
            spent += answer["seconds"] if round_ >= 0 else 0.0
            if round_ >= 0:
                answers[v].append(answer)
            took = f"{answer['seconds']:9.3f} s, CPU {answer['cpu_seconds']:9.3f} s"
            print(f"{name:8}{v:12}{took}  loss {answer['loss']:+.6f}", file=sys.stderr, flush=True)
    return answers


def scale(report: harness.Report, order: Order, config: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure one rank, two ranks that shard the weights, and two ranks that keep them gathered during an update."""
    order = replace(order, variant="agentrl", threads=1 if options.device == "cpu" else order.threads)
    counts = count(make_samples(order.shape, config["vocab_size"]), order.minibatches, order.budget)
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(running(replace(order, keep_gathered=keeps), ranks=n))
            for name, n, keeps in (("1", 1, False), ("2", 2, False), ("2_kept", 2, True))
        }
        for worker in workers.values():
            worker.hear()
        answers = take_turns("ranks", workers, options.rounds, options.device == "cpu")
    speeds = {n: [counts.tokens / a["seconds"] for a in taken] for n, taken in answers.items()}
    report.compare("ranks", speeds, "tokens/s", "1")


def add_mfu(
    report: harness.Report,
    name: str,
    answers: dict[str, list[dict[str, Any]]],
    counts: Counts,
    config: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Add the model FLOP utilisation, if the device's peak is known."""
    known = peak_flops(torch.device("cuda"))
    peak = options.peak_tflops * 1e12 if options.peak_tflops else known
    if peak is None:
        report.notes["mfu"] = "unknown device: give --peak-tflops"
        return
    work = 4 * matmul_flops(config, counts.distinct, counts.loss_tokens)  # recompute, forward, backward
    for v, taken in answers.items():
        report.add(f"mfu/{name}/{v}", [100 * work / a["seconds"] / peak for a in taken], "%")


@dataclass
class Worker:
    """The processes of a variant: one, or one per rank. Their first line says that they are ready."""

    processes: list[subprocess.Popen[str]]

    def step(self, line: str) -> dict[str, Any]:
        """Send a line to all processes; returns rank 0's answer once all have answered."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Read a line of each process; returns rank 0's. Raises SystemExit if a process has ended."""
        lines = []
        for process in self.processes:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
            if not lines[-1]:
                raise SystemExit(f"a process ended: {process.args!r}")
        answer: dict[str, Any] = json.loads(lines[0])
        return answer


@contextmanager
def running(order: Order, ranks: int = 1) -> Iterator[Worker]:
    """Start the variant's processes; close their input, which ends them, when the block ends."""
    processes = [start(order, rank, ranks, port) for port in [free_port()] for rank in range(ranks)]
    try:
        yield Worker(processes)
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(order: Order, rank: int, ranks: int, port: int) -> subprocess.Popen[str]:
    """Start one process of a variant."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        environment |= {key: str(value) for key, value in places.items()}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "training.worker", order.dump()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
        env=environment,
    )


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    main()

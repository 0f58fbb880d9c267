"""Runs on a GPU machine what needs a GPU: marked tests and benchmarks, each part within ten minutes.

    python benchmarks/gpu.py                            all parts that have no result yet (`make gpu`)
    python benchmarks/gpu.py --again attention          this part anew
    python benchmarks/gpu.py --rehearse                 every part, tiny, on a CPU, into build/gpu-rehearsal.json
    python benchmarks/gpu.py --rehearse --only titan gains

Parts:

- `tests`: the tests marked `gpu`.
- `trainer`: a training step and its MFU against TRL (`make setup-trl`) and a padded loop (benchmarks/trainer.py).
- `titan`: a step on equal rows, and its MFU, against a torchtitan-like loop with FSDP2.
- `attention`: time and memory of attention at 4k to 128k tokens, for one sequence and for a tree.
- `gains`: what merged prefixes and packing save, beside theory.
- `memory`: peak memory against the estimate of `tokens_per_microbatch: auto`.
- `plan`: `agentrl plan` for this GPU, where this version has it.
- `mismatch`: logprobs of engine and trainer in bfloat16, in three steps of the quick demo (needs SGLang).
- `publish`: a publish by every transport (benchmarks/publish.py; needs SGLang).

Each part is a process of its own with a deadline, and its result is kept as soon as it ends: after an interruption the
same command goes on. A part whose package is absent says so in its result. Without a GPU the exit status is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
GPU_TESTS = "test_*on_gpu.py"
RESULTS = HERE / "results" / "gpu.json"
REHEARSED = ROOT / "build" / "gpu-rehearsal.json"
DEADLINE_S = 600.0
OWN = ("titan", "attention", "gains", "memory")
PARTS = ("tests", "trainer", *OWN, "plan", "mismatch", "publish")
LAST_LINES = 12
Json = dict[str, Any]


class Absent(Exception):
    """A part's package is not installed; the message says which."""


def main() -> int:
    """Run the parts; returns the exit status."""
    options = arguments()
    if options.part:
        options.out.write_text(json.dumps(run_here(options.part, options.rehearse)))
        return 0
    if importlib.util.find_spec("torch") is None:
        print(f"gpu: {sys.executable} has no torch: pip install '.[gpu]', or name another Python: make gpu PYTHON=…")
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if not options.rehearse and not has_gpu():
        print("gpu: torch finds no GPU on this machine; --rehearse runs every part with tiny shapes on the CPU")
        return 2
    out = options.out or (REHEARSED if options.rehearse else RESULTS)
    report = json.loads(out.read_text()) if out.is_file() else {"benchmark": "gpu", "parts": {}}
    report["machine"] = machine()
    for name in options.only or PARTS:
        if name in report["parts"] and report["parts"][name]["state"] == "done" and name not in options.again:
            print(f"{name:10} kept: {out} has its result (--again {name} measures it anew)")
            continue
        report["parts"][name] = result = run_part(name, options.rehearse, options.deadline)
        write(out, report)
        why = f": {result['why']}" if result["why"] else ""
        print(f"{name:10} {result['state']} after {result['seconds']:.0f} s{why}")
    states = [report["parts"][name]["state"] for name in options.only or PARTS]
    return 1 if "failed" in states or "late" in states else 0


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"the file of results ({RESULTS.relative_to(ROOT)})")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="only these parts")
    parser.add_argument("--again", nargs="+", choices=PARTS, default=[], metavar="PART", help="measure these anew")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for each part (600)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in the child
    return parser.parse_args()


def has_gpu() -> bool:
    """Whether torch can use a GPU."""
    import torch

    return torch.cuda.is_available()


def machine() -> Json:
    """The GPUs and versions."""
    import torch
    import transformers

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": names,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def run_part(name: str, rehearse: bool, deadline_s: float) -> Json:
    """Run a part in a process group of its own, which is killed at the deadline."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, str(Path(__file__)), "--part", name, "--out", str(out)]
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, *(["--rehearse"] if rehearse else [])],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if rehearse else {}),
            )
            try:
                status: int | None = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # also what the part has started and left
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result: Json = {"state": "late", "why": f"not done after {deadline_s:g} s", "figures": {}}
        if out.is_file():
            result = json.loads(out.read_text())
        elif status is not None:
            result = {"state": "failed", "why": " | ".join(log.read_text().splitlines()[-LAST_LINES:]), "figures": {}}
    taken = {"seconds": time.monotonic() - start, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    return result | taken


def run_here(name: str, rehearse: bool) -> Json:
    """The result of a part, in this process."""
    try:
        figures = own_part(name, rehearse) if name in OWN else OTHERS[name](rehearse)
    except Absent as absent:
        return {"state": "absent", "why": str(absent), "figures": {}}
    return {"state": "done", "why": "", "figures": {key: list(figure) for key, figure in figures.items()}}


def own_part(name: str, rehearse: bool) -> Json:
    """A part of `gpus`."""
    from gpus.own_parts import PARTS as MEASURED

    from agentrl.trainer.distributed import join_world

    with tempfile.TemporaryDirectory() as folder, join_world("cpu" if rehearse else "cuda") as world:
        return dict(MEASURED[name](Path(folder), world, rehearse=rehearse))


def called(*command: str) -> str:
    """Run a command to its end; returns its output. Raises RuntimeError, with the end of the output."""
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}{done.stdout[-2000:]}"
        )
    return done.stdout


def tests(rehearse: bool) -> Json:
    """The tests marked `gpu`; on a CPU all of them are skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = [str(path) for path in sorted((ROOT / "tests").rglob(GPU_TESTS))]
        options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}")
        called(sys.executable, "-m", "pytest", *options, *files)
        (suite,) = ET.parse(report).getroot().iter("testsuite")
    counts = {name: float(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    if not rehearse and counts["skipped"] == counts["tests"]:
        raise RuntimeError("all tests were skipped")
    return {name: (count, "tests") for name, count in counts.items()}


def benchmark(script: str, *options: str) -> Json:
    """The figures of another benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        called(sys.executable, str(HERE / script), *options, "--out", str(out))
        figures = json.loads(out.read_text())["figures"]
    return {figure["name"]: (figure["value"], figure["unit"]) for figure in figures}


def trainer(rehearse: bool) -> Json:
    """A step against TRL, if it can be imported, and a padded loop."""
    from training.trl_grpo import is_available

    found = is_available()
    variants = "agentrl,trl,padded" if found else "agentrl,padded"
    device = ("--quick", "--threads", "1", "--shapes", "even") if rehearse else ("--device", "cuda")
    figures = benchmark("trainer.py", "--variants", variants, *device)
    return figures | ({} if found else {"trl": (0.0, "absent: make setup-trl")})


def plan(rehearse: bool) -> Json:
    """The plan of a run on this machine's GPU."""
    if importlib.util.find_spec("agentrl.trainer.planning") is None:
        raise Absent("this version has no agentrl.trainer.planning")
    import torch

    from agentrl.trainer.metrics.flops import device_of

    device = None if rehearse else device_of(torch.device("cuda"))
    label = "H100-80" if rehearse else device.label if device else None
    if label is None:
        raise Absent("this GPU is not in the table of agentrl/trainer/metrics/devices.py")
    command = ("plan", str(ROOT / "agents" / "demo-quick.yaml"), "--gpus", f"1x{label}", "--json")
    json.loads(called(sys.executable, "-m", "agentrl", *command))
    return {"planned": (1.0, label)}


def mismatch(rehearse: bool) -> Json:
    """|log π of the trainer − log π of the engine| over the tokens of a short run in bfloat16."""
    _needs_sglang()
    with tempfile.TemporaryDirectory() as folder:
        steps = ("steps=1", "evaluation.size=8") if rehearse else ("steps=3",)
        types = ("engine.dtype=bfloat16", "trainer.dtype=bfloat16")
        called(sys.executable, "-m", "agentrl", "demo", "--quick", "--runs-dir", folder, *types, *steps)
        summary = json.loads(next(Path(folder).glob("*/summary.json")).read_text())
    return {"logprob_mismatch_mean_abs": (summary["logprob_mismatch_mean_abs"], "nats")}


def publish(rehearse: bool) -> Json:
    """A publish by every transport to an engine of a random model in bfloat16."""
    _needs_sglang()
    import torch
    from gpus.subjects import save_random

    from agentrl.models import resolve_model

    size, device = ("tiny", "cpu") if rehearse else ("0.6B", "cuda")
    with tempfile.TemporaryDirectory(prefix="publish") as folder:
        model = Path(folder) / f"qwen3_{size}"
        save_random(model, size, torch.device(device))
        for file in resolve_model("tiny").glob("token*"):  # an engine needs a tokenizer, if only to start
            (model / file.name).write_bytes(file.read_bytes())
        return benchmark("publish.py", "--fleets", f"{model}-bfloat16", "--rounds", "1" if rehearse else "3")


def _needs_sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        raise Absent("sglang is not installed: pip install 'agentrl[gpu]'")


OTHERS: dict[str, Callable[[bool], Json]] = {
    "tests": tests,
    "trainer": trainer,
    "plan": plan,
    "mismatch": mismatch,
    "publish": publish,
}


def write(path: Path, report: Json) -> None:
    """Write the results, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(report, indent=2) + "\n")
    os.replace(staging, path)


if __name__ == "__main__":
    sys.exit(main())

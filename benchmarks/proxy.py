"""Measures the cost of a call through the proxy and through other gateways, in front of the same fake engine.

    python benchmarks/proxy.py --out benchmarks/results/proxy.json
    python benchmarks/proxy.py --quick
    python benchmarks/proxy.py --variants agentrl,starlette_httpx --concurrency 32

The measured cost is the CPU time (user and system) of the variant's process and its children during a round of calls,
divided by the number of calls. The engine and the load generator run in other processes and are not counted. Opening
the sessions is not counted either. A call is a turn of an agent. A session has five turns, whose prompts average 2,000
tokens; each turn has 300 sampled tokens with logprobs (`peers/payload.py`). Each call sends the whole conversation,
with the replies as they were delivered. Every variant gets the same bodies. With 128 or more calls in flight, one turn
of each session is counted, each of the five equally often; the turns before it are made before the measurement.

- `cpu_per_call/VARIANT/cN[/stream]`: with N calls in flight.
- `cpu_per_call_first/VARIANT/c32`: every call is the first of its session and shares none of its 2,000 tokens.
- `cpu_per_call_logprobs/VARIANT/c32`: the agent requests logprobs. In the other figures only gateways that record
  request them; the engine's chat route sends them in any case, because training needs them.
- `cpu_per_call_text/VARIANT/c32`: agent and gateway request no logprobs, and the engine's chat route sends none.
- `throughput/VARIANT/c128`: calls per second with an engine that takes 1 s for each call.
- `bytes_per_turn`: the bulk columns of a call; `bytes_per_turn/file`: the database file over its calls.

docs/proxy-benchmark.md says how each variant is set up.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import harness
import sqlalchemy as sa
from peers import payload
from peers.rounds import Bench, Case
from peers.variants import (
    OF_PEERS,
    PEERS,
    VARIANTS,
)
from turns import long_model

from agentrl.store import Database
from agentrl.store.tables import interaction_data, interactions

BASE = "starlette_httpx"
ALL = (1, 32, 128, 512)
ONLY_OURS = (8, 256)
ONE_TURN_FROM = 128
ENOUGH_S = 12.0  # a figure whose rounds took this long together gets no further round
TOO_LONG_S = 45.0  # a round that would take longer, judged by the cost at 32 in flight, is skipped and noted


def main() -> None:
    """Measure, print a table, write JSON."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the processes that this one started
    report = harness.Report("proxy")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = long_model(folder / "model", "chatml")
        bench = Bench(folder, model, [v for v in VARIANTS if v in options.variants])
        with bench.running():
            measure(report, bench, cases(options), options)
        for variant in bench.variants:
            if variant.name == "agentrl":
                stored(report, folder / variant.name)
    harness.finish(report, options.out)


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each figure, after one that warms up (3)")
    parser.add_argument("--quick", action="store_true", help="one short round at 1 and 32 in flight")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS), help="only these")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], help="only these")
    parser.add_argument("--only", default="", help="only figures whose name begins so, for example cpu_per_call/")
    options = parser.parse_args()
    if unknown := set(options.variants) - set(VARIANTS):
        parser.error(f"no variant {', '.join(sorted(unknown))}: there are {', '.join(VARIANTS)}")
    if OF_PEERS & set(options.variants) and not (PEERS / "python").exists():
        parser.error("no .venv-peers: run `make setup-peers`")
    if options.quick:
        options.rounds = 1
    return options


def cases(options: argparse.Namespace) -> list[Case]:
    """All figures, without their variants."""
    wanted = options.concurrency or ((1, 32) if options.quick else sorted(ALL + ONLY_OURS))
    found = [Case("cpu_per_call", n, stream) for n in wanted for stream in (False, True)]
    found += [
        Case("cpu_per_call_first", 32, first=True),
        Case("cpu_per_call_logprobs", 32, logprobs=True),
        Case("cpu_per_call_text", 32, logprobs=False),
        Case("throughput", 32 if options.quick else 128, delay_s=1.0),
    ]
    return [case for case in found if case.figure.startswith(options.only.rstrip("/"))]


def is_for(case: Case, variant: str) -> bool:
    """Whether the variant has this figure."""
    if case.figure == "throughput":
        return True
    return variant != "direct" and (variant == "agentrl" or case.in_flight not in ONLY_OURS)


def measure(report: harness.Report, bench: Bench, found: list[Case], options: argparse.Namespace) -> None:
    """Measure all figures: one case after another, and its variants in turn, round by round."""
    for stream in (False, True):
        for variant in bench.variants:  # warm up
            bench.round(variant, Case("", 8, stream), 8, payload.TURNS)
    known: dict[tuple[str, bool], float] = {}  # seconds per call under full load
    for case in found:
        variants = [variant for variant in bench.variants if is_for(case, variant.name)]
        samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
        spent = dict.fromkeys(samples, 0.0)
        for _ in range(options.rounds):
            for variant in variants:
                name = variant.name
                sessions, turns = size(case, options.quick)
                if not case.delay_s and known.get((name, case.stream), 0.0) * sessions * turns > TOO_LONG_S:
                    report.notes.setdefault("left out, would take too long", []).append(case.named(name))
                    spent[name] = ENOUGH_S
                if spent[name] >= ENOUGH_S:
                    continue
                cost, result = bench.round(variant, case, sessions, turns)
                samples[name].append(result["rate"] if case.figure == "throughput" else 1000 * cost)
                spent[name] += result["seconds"]
                if case.figure == "cpu_per_call" and case.in_flight == 32:
                    known[name, case.stream] = result["seconds"] / result["calls"]
                print(
                    f"{case.named(name):42} {samples[name][-1]:9.3f}  {result['calls']} calls in "
                    f"{result['seconds']:.1f} s, {result['bytes']:.0f} B each",
                    file=sys.stderr,
                    flush=True,
                )
        add(report, case, {name: values for name, values in samples.items() if values})


def add(report: harness.Report, case: Case, samples: dict[str, list[float]]) -> None:
    """Add the figures of a case; the one that the others are compared with comes first."""
    unit, base = ("calls/s", "direct") if case.figure == "throughput" else ("ms", BASE)
    for name in sorted(samples, key=lambda name: name != base):
        is_compared = base in samples and name != base
        report.add(case.named(name), samples[name], unit, case.named(base) if is_compared else None)


def size(case: Case, quick: bool) -> tuple[int, int]:
    """(sessions, calls in each of them) of one round."""
    if case.first:
        return (64 if quick else 128), 1
    if case.in_flight >= ONE_TURN_FROM and not case.delay_s:
        return max(256 if not case.stream else 0, case.in_flight), 1
    fewest = 2 if quick or case.stream else 8  # streams take longer
    return max(fewest, case.in_flight), payload.TURNS


def stored(report: harness.Report, folder: Path) -> None:
    """Add the bytes that a call takes in the store. Each call but a session's first must have extended another."""
    database = Database(f"sqlite:///{folder}/bench.db")
    data = interaction_data.c
    sizes = [
        sa.func.length(c)
        for c in (data.new_messages, data.answer, data.prompt_delta_ids, data.output_ids, data.logprobs)
    ]
    with database.read() as conn:
        calls, total, forks = conn.execute(
            sa.select(
                sa.func.count(),
                sa.func.sum(sum(sizes[1:], sizes[0])),
                sa.func.sum(sa.case((interactions.c.bridged | (interactions.c.messages <= 3), 0), else_=1)),
            ).join(interaction_data, data.interaction_id == interactions.c.id)
        ).one()
        prompt = conn.execute(sa.select(sa.func.avg(interactions.c.prompt_tokens))).scalar_one()
        pages = conn.execute(sa.text("PRAGMA page_count")).scalar_one()
        page = conn.execute(sa.text("PRAGMA page_size")).scalar_one()
    database.close()
    report.notes |= {"calls": calls, "prompt_tokens": round(float(prompt)), "forks": forks}
    report.add("bytes_per_turn", [total / calls], "B")
    report.add("bytes_per_turn/file", [pages * page / calls], "B")


if __name__ == "__main__":
    main()

"""Measures attention along a forest: exactness, memory and time, up to 32k tokens.

    python benchmarks/attention.py --out benchmarks/results/attention.json
    python benchmarks/attention.py --quick

A forest is one tree: a prompt of a quarter of the tokens, four branches, two answers to each. One core.

- `exact/TOKENS/…`: the loss and the gradients (worst parameter) of the packed forest against the sum over its eight
  paths, each by transformers alone, in float64; relative differences.
- `memory/TOKENS/WAY` and `time/TOKENS/WAY` of a forward and backward pass of a 4-layer model: `packed`; `dense`, with a
  mask of all pairs; `alone`, as many tokens as four sequences that share nothing, one by one. A process for each.
- `memory/slope`: (bytes per token at the largest size) / (bytes per token at 8k): 1 is linear.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import harness
from forests.exactness import compare
from forests.passes import measured
from forests.shape import branching

EXACT = (1024, 8192, 32768)
SIZES = (1024, 4096, 8192, 16384, 32768)
QUICK = (1024, 2048)
DENSE_UP_TO = 8192
"""A dense mask of 32k tokens has 4 GiB."""
ROUNDS = 3


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that everything runs")
    options = parser.parse_args()
    report = harness.Report("attention")
    for tokens in QUICK if options.quick else EXACT:
        for name, gap in compare(branching(tokens)).items():
            report.add(f"exact/{tokens}/{name}", [gap], "relative")
    for tokens in QUICK if options.quick else SIZES:
        ways = ("alone", "packed", "dense") if tokens <= DENSE_UP_TO else ("alone", "packed")
        rounds = [{way: measured(way, tokens) for way in ways} for _ in range(ROUNDS)]
        for kind, unit in (("seconds", "s"), ("bytes", "bytes")):
            samples = {way: [found[way][kind] for found in rounds] for way in ways}
            report.compare(f"{'time' if kind == 'seconds' else 'memory'}/{tokens}", samples, unit, "alone")
    small, large = (QUICK[0], QUICK[-1]) if options.quick else (8192, SIZES[-1])
    per_token = [report[f"memory/{tokens}/packed"].value / tokens for tokens in (small, large)]
    report.add("memory/slope", [per_token[1] / per_token[0]], "×")
    harness.finish(report, options.out)


if __name__ == "__main__":
    main()

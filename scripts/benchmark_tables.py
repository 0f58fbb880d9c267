"""Prints docs/benchmarks.md from benchmarks/results/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
HEAD = """# Benchmarks

Each benchmark is `python benchmarks/NAME.py --out FILE.json`, and says in its `--help` what it measures. Variants take
turns, round by round; a figure is the median over the rounds. The machines are noisy, so read ratios: they compare
figures of one run. This page is made from `benchmarks/results/`:
`python scripts/benchmark_tables.py > docs/benchmarks.md`.
"""


def main() -> None:
    """Print one table per result file that has figures."""
    print(HEAD)
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("figures"):
            print(section(path.name, result))


def section(name: str, result: dict[str, Any]) -> str:
    """A heading, the machine and versions, and the table of figures."""
    machine = result["machine"]
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    lines = [
        f"## {result['benchmark']}",
        "",
        f"`benchmarks/results/{name}`, {result['date'][:10]}, {machine['cores']} cores ({machine['cpu']}); {versions}.",
        "",
        "| figure | value | ratio | to | min … max | rounds |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for f in result["figures"]:
        ratio = "" if f["ratio"] is None else f"{f['ratio']:.2f}×"
        spread = "" if f["min"] is None else f"{number(f['min'])} … {number(f['max'])}"
        rounds = "" if f["rounds"] is None else f["rounds"]
        value = f"{number(f['value'])} {f['unit']}"
        lines.append(f"| {f['name']} | {value} | {ratio} | {f['ratio_to'] or ''} | {spread} | {rounds} |")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """A number with three significant digits and thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()

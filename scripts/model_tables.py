"""Puts the table of benchmarks/results/plan.json into docs/large-models.md: python scripts/model_tables.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "large-models.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
GIB, GB = 2**30, 1e9
HEAD = [
    "| model | GPUs | ranks of a replica | state | gathered | gradients | activations, logits, other | needed | fits | "
    "seconds | waiting | moved |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
]


def row(r: dict[str, Any]) -> str:
    """A line of the table."""
    experts = f", experts over {r['experts']}" if r.get("experts", 1) > 1 else ""
    first = f"| {r['model']}{experts} | {r['gpus']} | {r['shards']} |"
    if "peak_bytes" not in r:
        return f"{first} {r['state_bytes'] / GIB:,.0f} GiB | | | | | no | | | |"
    held = r["peak_bytes"]
    state = held.get("parameters", 0) + held.get("moments", 0)
    rest = sum(held.values()) - state - held.get("gathered", 0) - held.get("gradients", 0)
    sizes = [state, held.get("gathered", 0), held.get("gradients", 0), rest, r["needed_bytes"]]
    moved = sum(c["bytes"] for c in r["collectives"])
    cells = [f"{size / GIB:,.1f} GiB" for size in sizes]
    times = [f"{r['step_s']:.1f} s", f"{r['waiting_s']:.1f} s", f"{moved / GB:,.0f} GB"]
    return f"{first} {' | '.join([*cells, 'yes' if r['fits'] else 'no', *times])} |"


def main() -> None:
    """Replace what is between the two marks."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())["notes"]["rows"]
    ordered = sorted(rows.values(), key=lambda r: (r["parameters"], r["gpus"], r.get("experts", 1)))
    table = "\n".join([*HEAD, *map(row, ordered)])
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


if __name__ == "__main__":
    main()

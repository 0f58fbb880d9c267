"""The parts that all benchmarks share: interleaved rounds, medians, ratios within a run, the JSON report.

    python benchmarks/NAME.py --out FILE.json

Times on a busy machine vary, but ratios of times vary little. So the variants of a comparison take turns, round by
round. A figure is the median over the rounds, with its ratio to another figure of the same run where one is named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from rich.table import Table

from agentrl.console import Console

PACKAGES = (
    "agentrl",
    "sqlalchemy",
    "psycopg",
    "numpy",
    "torch",
    "transformers",
    "trl",
    "sglang",
    "fastapi",
    "uvicorn",
    "aiohttp",
)


@dataclass(frozen=True)
class Figure:
    """One measured number. `ratio` is its value over that of the figure called `ratio_to`."""

    name: str
    value: float
    unit: str
    ratio_to: str | None
    ratio: float | None
    min: float
    max: float
    rounds: int


@dataclass
class Report:
    """The figures of a benchmark so far, and notes about the measurement."""

    benchmark: str
    figures: list[Figure] = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)

    def add(
        self,
        name: str,
        samples: list[float],
        unit: str,
        ratio_to: str | None = None,
        statistic: Callable[[list[float]], float] = median,
    ) -> Figure:
        """Add the median of `samples`, or another statistic; `ratio_to` names a figure that was added before."""
        value = statistic(samples)
        ratio = None if ratio_to is None else value / self[ratio_to].value
        figure = Figure(name, value, unit, ratio_to, ratio, min(samples), max(samples), len(samples))
        self.figures.append(figure)
        return figure

    def compare(self, prefix: str, samples: Mapping[str, list[float]], unit: str, base: str) -> None:
        """Add one figure per variant, `prefix/variant`, with ratios to the variant `base`."""
        for name in sorted(samples, key=lambda variant: variant != base):
            self.add(f"{prefix}/{name}", samples[name], unit, None if name == base else f"{prefix}/{base}")

    def __getitem__(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)

    def show(self) -> None:
        """Print a table."""
        table = Table("figure", "value", "unit", "ratio", "to", "min … max", "rounds", title=self.benchmark)
        for f in self.figures:
            ratio = "" if f.ratio is None else f"{f.ratio:.2f}×"
            spread = f"{f.min:.4g} … {f.max:.4g}"
            table.add_row(f.name, f"{f.value:.4g}", f.unit, ratio, f.ratio_to or "", spread, str(f.rounds))
        Console(width=160).print(table)

    def write(self, path: Path) -> None:
        """Write machine, versions, date, notes and figures, atomically."""
        report = {
            "benchmark": self.benchmark,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cores": os.cpu_count(), "cpu": _cpu(), "system": platform.system()},
            "versions": {"python": platform.python_version(), **_versions()},
            "notes": self.notes,
            "figures": [asdict(figure) for figure in self.figures],
        }
        write_json(path, report)


def write_json(path: Path, value: object) -> None:
    """Write a file of indented JSON, atomically."""
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(staging, path)


def interleave(variants: Mapping[str, Callable[[], float]], rounds: int, warmups: int = 1) -> dict[str, list[float]]:
    """Run every variant once per round, in turn; returns the results of each, without the warm-up rounds."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(-warmups, rounds):
        for name, variant in variants.items():
            value = variant()
            if round_ >= 0:
                samples[name].append(value)
    return samples


def arguments(doc: str | None, **extra: tuple[type, object, str]) -> argparse.Namespace:
    """Parse `--out`, `--rounds` and further options, given as `name=(type, default, help)`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    for name, (kind, default, text) in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"{text} ({default})")
    return parser.parse_args()


def finish(report: Report, out: Path | None) -> None:
    """Print the table, and write the file when one was asked for."""
    report.show()
    if out is not None:
        report.write(out)


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

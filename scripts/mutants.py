"""Changes the code in small ways and counts the changes that no test notices: `make mutants`, or with names of groups.

Each group of scripts/mutants.toml is a set of modules and the tests that state their rules. mutmut works on a copy of
the tree in build/mutants/GROUP, where the symbolic links of packages are folders; the checkout stays as it is. The
table counts the changes ("mutants") by module; the diff of every mutant that survived is in build/mutants/GROUP.diff.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "mutants"
TOOL = ROOT / ".venv-mutants" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
COPIED = ("agentrl", "tests", "pyproject.toml")
STATUSES = ("killed", "survived", "timeout", "no tests")
RESULT = re.compile(r"^ +(?P<module>[\w.]+)\.(?P<mutant>xǁ?\w+__mutmut_\d+): (?P<status>.+)$", re.MULTILINE)


def main() -> None:
    """Run the named groups, else all of them, and print the table."""
    groups: dict[str, Any] = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", choices=[[], *groups], help=f"of {', '.join(groups)}")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    for name in options.groups or groups:
        counts |= run(name, groups[name], options.processes)
    print(table(counts))


def run(name: str, group: dict[str, Any], processes: int) -> dict[str, Counter[str]]:
    """Run one group; returns the number of mutants in each status, by module."""
    folder = BUILD / name
    copy(folder)
    configure(folder, group)
    patterns = [f"{module_name(m)}.{f}__mutmut_*" for m in group["modules"] for f in group.get("functions", ["*"])]
    with (BUILD / f"{name}.log").open("w") as log:
        mutmut(folder, "run", "--max-children", str(processes), *patterns, stdout=log)
    found = [m.groups() for m in RESULT.finditer(mutmut(folder, "results", "--all", "1"))]
    found = [(module, mutant, status) for module, mutant, status in found if status != "not checked"]
    with (BUILD / f"{name}.diff").open("w") as diffs:
        for module, mutant, status in found:
            if status != "killed":
                diffs.write(mutmut(folder, "show", f"{module}.{mutant}"))
    counts: dict[str, Counter[str]] = {}
    for module, _, status in found:
        counts.setdefault(module, Counter())[status] += 1
    return counts


def copy(folder: Path) -> None:
    """Make a fresh copy of the tree, without symbolic links."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)


def configure(folder: Path, group: dict[str, Any]) -> None:
    """Write mutmut's settings into the copy's pyproject.toml."""
    settings = {
        "source_paths": ["agentrl"],
        "only_mutate": group["modules"],
        "pytest_add_cli_args": ["-k", "not postgresql", "-p", "no:cacheprovider", "-n", "0", "--tb=no"],
        "pytest_add_cli_args_test_selection": group["tests"],
        "process_isolation": "forkserver",  # torch is not safe to fork once it has computed
        "timeout_multiplier": 40.0,  # of the tests' own time: on a busy machine too, only an endless test is stopped
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    with (folder / "pyproject.toml").open("a") as file:
        file.write("\n".join(["", "[tool.mutmut]", *lines, ""]))


def module_name(path: str) -> str:
    """`agentrl/credit.py` → `agentrl.credit`."""
    return path.removesuffix(".py").replace("/", ".")


def mutmut(folder: Path, *arguments: str, stdout: Any = subprocess.PIPE) -> str:
    """Run mutmut in a copy, with this interpreter and its packages. CI=1 fixes Hypothesis' examples."""
    environment = os.environ | {"PYTHONPATH": str(TOOL), "OMP_NUM_THREADS": "1", "CI": "1"}
    command = [sys.executable, "-m", "mutmut", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=stdout, text=True, check=True)
    return done.stdout or ""


def table(counts: dict[str, Counter[str]]) -> str:
    """Markdown: a row for each module, and the sum."""
    total: Counter[str] = sum(counts.values(), Counter())
    rows = [(f"`{module}`", count) for module, count in counts.items()] + [("all", total)]
    lines = [f"| module | mutants | {' | '.join(STATUSES)} | score |", f"| --- {'| ---: ' * (len(STATUSES) + 2)}|"]
    for module, count in rows:
        caught = count["killed"] + count["timeout"]
        numbers = [count.total(), *(count[status] for status in STATUSES)]
        lines.append(f"| {module} | {' | '.join(map(str, numbers))} | {100 * caught / max(count.total(), 1):.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

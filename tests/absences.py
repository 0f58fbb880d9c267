"""What may be absent where tests run. In CI nothing else may: a suite that skips there tests nothing, and says so.

With NO_SKIPS set (`.ci/run` does) a test that is skipped for another reason than those of `DELIBERATE` fails.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator

import pytest

NO_SKIPS = "AGENTRL_TEST_NO_SKIPS"
DELIBERATE = {
    "TRL cannot be imported": "an environment of its own, for measurements alone (make setup-trl)",
    "this PyTorch has no oneDNN": "a matter of the processor",
    "no GPU": "a matter of the machine (make gpu)",
    "Slurm's daemons": "need packages of the system and root (docs/slurm.md)",
    "no Chromium that starts": "a package of the system, which scripts/chromium installs where it may",
    "no isolation by bubblewrap": "a package of the system; the other isolation is tested everywhere",
    "no isolation by landlock": "a matter of the kernel",
    "no package for this fabric": "optional packages for GPUs and fabrics; stand-ins are tested everywhere",
    "mounting a small file system is not permitted": "needs the right to mount",
}
"""How the reason of a skip begins → why it is one in CI too."""


def fault(reason: str) -> str | None:
    """What is wrong with a skip for this reason; None where skips are allowed, or this one is."""
    said = reason.removeprefix("Skipped: ")
    if not os.environ.get(NO_SKIPS) or any(said.startswith(known) for known in DELIBERATE):
        return None
    return f"{NO_SKIPS} is set, and this was skipped: {said}"


def left_out(reasons: list[str]) -> str:
    """One line that counts the skipped tests by the environment they need; empty when none was skipped."""
    targets = Counter(found[1] for reason in reasons if (found := re.search(r"run `(make setup-[\w-]+)`", reason)))
    if not targets:
        return ""
    return "left out: " + ", ".join(f"{count} tests that need `{target}`" for target, count in sorted(targets.items()))


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a session says what it left out."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        skipped = [report.longrepr for report in reporter.stats.get("skipped", [])]
        if line := left_out([reason[2] for reason in skipped if isinstance(reason, tuple)]):
            reporter.write_line(line)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of a test, its setup or its teardown."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of a module that skips as a whole."""
    report = yield
    _fail_if_skipped(report)
    return report


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple) and (problem := fault(report.longrepr[2])) is not None:
        report.outcome, report.longrepr = "failed", problem

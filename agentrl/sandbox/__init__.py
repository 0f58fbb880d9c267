"""Runs code that a model wrote, apart from everything else: no network, no files but its own, bounded in all it uses.

    run(command, files, stdin) ─► bubblewrap, else unshare + Landlock ─► prlimit ─► command     in an empty folder

sandbox_run.py       starts, feeds, bounds and ends one command
isolation.py         chooses how to isolate, by trying
sandbox_files.py     hands the command its files, in memory
landlocked.py        restricts files without bubblewrap; runs inside
"""

from agentrl.sandbox.sandbox_run import Limits, Result, run, run_python

__all__ = ["Limits", "Result", "run", "run_python"]

"""Measures each Python process that `make coverage` starts: Python imports it from PYTHONPATH at its start."""

from __future__ import annotations

import coverage

coverage.process_startup()

"""How far property tests search: quickly and alike in every run (`ci`), or long and at random (`thorough`).

`make test-thorough` chooses the second.
"""

from __future__ import annotations

import os

from hypothesis import settings

THOROUGH = "AGENTRL_TEST_THOROUGH"
"""Environment variable that chooses the profile `thorough`."""
TIMES = 20
"""How many times as many examples a thorough search tries."""

settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=50, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=50 * TIMES, print_blob=True)
settings.load_profile("thorough" if os.environ.get(THOROUGH) else "ci")


def examples(ci: int) -> int:
    """How many examples a test tries whose number is its own: `ci` of them, or many times as many."""
    return ci * TIMES if os.environ.get(THOROUGH) else ci

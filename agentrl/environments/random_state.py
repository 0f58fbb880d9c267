"""A state of Python's and NumPy's global random numbers for one game alone.

Libraries of games draw from the global generators. Episodes that take turns in one process would otherwise draw each
other's numbers, and no game could be repeated from its seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class RandomState:
    """The state of a game, from a seed."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this game's state until the block ends. The block must not wait for anything."""
        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)

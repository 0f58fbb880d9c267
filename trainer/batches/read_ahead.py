"""Reads the tokens of the next batch while a step runs: a thread of each rank, of low priority, into a bounded cache.

    step begins ─► start ─► guess the next batch ─► tokens of this rank's share ─► cache ─► … ─► lease ─► stop

It leases nothing and changes nothing. A wrong guess costs memory; the right one leaves the step to read what can still
change, which is in the outlines.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

from agentrl.domain.batches.outline import Outline
from agentrl.errors import StoreError
from agentrl.store.training.paths import path_tokens
from agentrl.trainer.batches.batch_reader import BatchReader

CHUNK_TOKENS = path_tokens.CHUNK_TOKENS // 4
"""Tokens that are read at once: the longest that a lease waits for the thread."""
AGAIN_S = 2.0
"""Seconds between two guesses."""
NICENESS = 10
TOKEN_BYTES = 8
"""Bytes of a token without experts."""

Guess = Callable[[], Sequence[Outline]]
"""All trajectories of the batch that will most likely be leased next."""
Mine = Callable[[Sequence[Outline]], Sequence[int]]
"""The indices of those that this rank will train."""


class ReadAhead:
    """Fills a reader's cache, from `start` to `stop`."""

    def __init__(self, reader: BatchReader, guess: Guess, mine: Mine) -> None:
        self._reader, self._guess, self._mine = reader, guess, mine
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read, unless the cache may hold nothing."""
        if self._thread is None and self._reader.cache.limit_bytes:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait until it has read what it is reading."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            try:
                self.fill()
            except (StoreError, *path_tokens.DAMAGED):  # the step that needs these tokens reads them, and reports it
                return
            if self._stop.wait(AGAIN_S):
                return

    def fill(self) -> None:
        """Guess once, and read what is missing, until told to stop or the cache is full."""
        cache, outlines = self._reader.cache, self._guess()
        cache.keep_only(one.trajectory_id for one in outlines)
        mine = {outlines[i].trajectory_id: outlines[i] for i in self._mine(outlines)}
        missing = {name: one.length for name, one in mine.items() if name not in cache}
        for chunk in path_tokens.chunks(missing, CHUNK_TOKENS):
            if self._stop.is_set() or not cache.fits(TOKEN_BYTES * sum(missing[name] for name in chunk)):
                return
            paths = {name: mine[name].calls for name in chunk}
            found = self._reader.database.query(path_tokens.read, paths)
            for name, tokens in found.items():
                if not cache.add(name, tokens):
                    return

"""The progress line of a rollout worker: groups, sessions per second, mean reward, failures, and what it waits for."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext

from rich.text import Text

from agentrl.console import Console
from agentrl.rollout.episode import Outcome

RECENT = 128
TTY_EVERY_S, LINE_EVERY_S = 0.5, 10.0


class Progress:
    """The counters of a worker and its progress line."""

    def __init__(self) -> None:
        self.groups = 0
        self.sessions = 0
        self.running = 0
        self.errors: Counter[str] = Counter()
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.waiting_for: str | None = None
        self.phase = "rollouts"
        self._beside: list[Progress] = []
        self._started = time.monotonic()

    def beside(self) -> Progress:
        """Add the counters of another activity, shown at the end of the line while any of its sessions run."""
        self._beside.append(Progress())
        return self._beside[-1]

    def running_now(self) -> int:
        """How many sessions run, those of other activities included."""
        return self.running + sum(other.running for other in self._beside)

    def group_done(self) -> None:
        """Count a finished group."""
        self.groups += 1

    async def session(self, play: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Run a session and count it."""
        self.running += 1
        try:
            outcome = await play()
        finally:
            self.running -= 1
        self.sessions += 1
        if outcome.error is not None:
            self.errors[outcome.error] += 1
        elif outcome.reward is not None:
            self.recent.append(outcome.reward)
        return outcome

    def waits(self, _seconds: float, why: str) -> None:
        """Callback for the client's `on_wait`."""
        self.waiting_for = why

    def line(self) -> str:
        """Format the counters as one line."""
        rate = self.sessions / max(time.monotonic() - self._started, 1e-9)
        parts = [f"{self.phase}: {self.running} sessions running", f"{self.sessions} ended ({rate:.1f}/s)"]
        if self.groups:
            parts.append(f"{self.groups} whole groups")
        if self.recent:
            parts.append(f"reward {sum(self.recent) / len(self.recent):.3f} over the last {len(self.recent)}")
        if self.errors:
            worst, times = self.errors.most_common(1)[0]
            parts.append(f"{self.errors.total()} failed, {times}× {worst[:120]}")
        if self.waiting_for:
            parts.append(f"waiting: {self.waiting_for}")
        parts += [other.line() for other in self._beside if other.running]
        return " · ".join(parts)


@asynccontextmanager
async def shown(progress: Progress, console: Console) -> AsyncIterator[None]:
    """Display the line on a terminal, or print it at intervals elsewhere."""

    def print_line() -> None:
        console.print(progress.line(), soft_wrap=True)

    with console.status(Text(progress.line())) if console.is_terminal else nullcontext() as status:
        every_s, show = LINE_EVERY_S, print_line
        if status is not None:
            every_s, show = TTY_EVERY_S, lambda: status.update(Text(progress.line()))
        repeating = asyncio.create_task(_repeat(every_s, show))
        try:
            yield
        finally:
            repeating.cancel()
    print_line()


async def _repeat(every_s: float, show: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(every_s)
        show()

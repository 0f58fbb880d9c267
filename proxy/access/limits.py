"""How many calls and tokens a caller may ask for: in one request, at once, and in a session.

    body ─► BodyLimits.read (413, 408) ─► decode ─► check (400) ─► Gate.admit (400, 429, 403) ─► sample ─► Slots.close

A temporary limit answers 429 with `Retry-After`. A permanent limit answers 403 `session_limit_reached`, because SDKs
retry 408, 409, 429 and 5xx, and agents read 400 as a context that is too long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from agentrl.configs.proxy_config import ProxyConfig
from agentrl.errors import RequestError, bad_parameter
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.recent import Recent
from agentrl.proxy.run_store import RunStore
from agentrl.store.sessions import session_usage

MAX_MESSAGES = 20_000
MAX_TOOLS = 2_000
RETRY_AFTER_S = 1.0


def check(asked: ModelRequest) -> None:
    """Raises RequestError 400 for a request with more parts than any agent needs. `BodyLimits` limits its bytes."""
    for param, found, most in (
        ("messages", len(asked.messages), MAX_MESSAGES),
        ("tools", len(asked.tools or ()), MAX_TOOLS),
    ):
        if found > most:
            raise bad_parameter(param, f"{found} {param}: at most {most} are taken")


@dataclass(slots=True)
class _Tree:
    """Counts of a root session and its sub-agents, as this process knows them: running calls, and all calls so far."""

    running: int = 0
    calls: int = 0


@dataclass(slots=True)
class Slots:
    """The slots of one request, one for each answer. Release them once: by `close` or, if no call began, `cancel`."""

    _gate: Gate
    _tree: _Tree
    answers: int

    def close(self) -> None:
        """Release the slots once the answers have ended, for any reason. Closing twice is harmless."""
        answers, self.answers = self.answers, 0
        self._gate.running -= answers
        self._tree.running -= answers

    def cancel(self) -> None:
        """Release the slots of calls that never began: they do not count."""
        self._tree.calls -= self.answers
        self.close()


@dataclass(slots=True, kw_only=True)
class Gate:
    """Admits calls while the proxy process and their session have free slots.

    A sub-agent's session counts towards its root session. The usage of a root session is read from the store at each
    call, if calls or tokens are limited. So a session exceeds its limits by no more than the calls that are running.
    """

    max_running: int
    max_running_of_session: int
    max_calls: int | None = None  # of a session
    max_tokens: int | None = None  # sampled in a session
    running: int = 0
    _trees: Recent[_Tree] = field(default_factory=Recent)

    @classmethod
    def of(cls, config: ProxyConfig) -> Self:
        """The gate of a run's configuration."""
        return cls(
            max_running=config.max_concurrent_calls,
            max_running_of_session=config.max_concurrent_calls_per_session,
            max_calls=config.max_calls_per_session,
            max_tokens=config.max_tokens_per_session,
        )

    async def admit(self, store: RunStore, root_id: str, answers: int, *, samples: bool = True) -> Slots:
        """The slots for a request of the session `root_id` or of a sub-agent under it.

        A request that does not sample (`samples` false) takes a slot, but does not count as a call of the session.
        Release it by `close`, not by `cancel`.

        Raises RequestError: 400 for more answers than there are slots, 429 while too few are free, 403 when the session
        has used up its calls or tokens.
        """
        used = None
        if samples and (self.max_calls is not None or self.max_tokens is not None):
            used = await store.read(session_usage.of_tree, root_id)
        tree = self._trees.get(root_id)
        if tree is None:
            tree = self._trees[root_id] = _Tree()
        if used is not None:
            tree.calls = max(tree.calls, used.calls)
        if samples:
            self._check_totals(tree, used.tokens if used is not None else 0, answers)
        self._check_free_slots(tree, answers)
        tree.running += answers
        tree.calls += answers if samples else 0
        self.running += answers
        return Slots(self, tree, answers)

    def forget(self, root_id: str) -> None:
        """Drop the counts of a session that has ended."""
        self._trees.pop(root_id, None)

    def _check_totals(self, tree: _Tree, tokens: int, answers: int) -> None:
        if self.max_calls is not None and tree.calls + answers > self.max_calls:
            raise _used_up(f"the session has made {tree.calls} of its {self.max_calls} calls")
        if self.max_tokens is not None and tokens >= self.max_tokens:
            raise _used_up(f"the session has sampled {tokens} of its {self.max_tokens} tokens")

    def _check_free_slots(self, tree: _Tree, answers: int) -> None:
        most = min(self.max_running, self.max_running_of_session)
        if answers > most:
            raise bad_parameter("n", f"{answers} answers in one request: at most {most} are sampled at once")
        if tree.running + answers > self.max_running_of_session:
            raise _busy(f"the session has {tree.running} calls under way, of {self.max_running_of_session}")
        if self.running + answers > self.max_running:
            raise _busy(f"the proxy has {self.running} calls under way, of {self.max_running}")


def _used_up(message: str) -> RequestError:
    return RequestError(403, message, code="session_limit_reached")


def _busy(message: str) -> RequestError:
    return RequestError(429, message, code="too_many_calls", retry_after_s=RETRY_AFTER_S)

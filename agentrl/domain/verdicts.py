"""What an agent says at its session's end: which tokens train (all, none with the reason, or some of some calls), and
whether a limit ended the episode.

end of session ─┬─ {"reject": "too easy"}                  ──► its trajectories are rejected with the reason
                ├─ {"trained_tokens": {call: [[0, 12]]}}   ──► only these output tokens enter the loss
                └─ {"truncated": true}                     ──► a critic's value may stand for what would have followed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentrl.domain.schemas import Json

Range = tuple[int, int]
"""Output tokens `[start, end)` of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict of one session. `ranges` maps the calls that train to ranges of their output tokens, ascending and
    disjoint; None: all tokens of all calls. `truncated` says that a limit ended the episode, such as one of its turns.
    """

    rejected: str | None = None
    ranges: Mapping[str, Sequence[Range]] | None = None
    truncated: bool = False

    @classmethod
    def of(cls, stored: Json | None) -> Verdict:
        """The verdict of a session's column."""
        if stored is None:
            return EVERYTHING
        return cls(
            rejected=stored.get("rejected"),
            ranges=stored.get("trained"),
            truncated=bool(stored.get("truncated")),
        )

    def stored(self) -> Json | None:
        """The value of a session's column; None for everything."""
        if self == EVERYTHING:
            return None
        return {"rejected": self.rejected, "trained": self.ranges, "truncated": self.truncated}

    def count(self, call_id: str, n_output: int) -> int:
        """How many of a call's `n_output` tokens train."""
        if self.ranges is None:
            return n_output
        return sum(end - start for start, end in self.ranges.get(call_id, ()))

    def within(self, call_id: str, spans: Iterable[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
        """The parts of a call's version spans `(version, start, end)` that train."""
        for version, start, end in spans:
            for first, last in [(start, end)] if self.ranges is None else self.ranges.get(call_id, ()):
                if max(start, first) < min(end, last):
                    yield version, max(start, first), min(end, last)

    def versions(self, call_id: str, spans: Iterable[Sequence[int]]) -> set[int]:
        """The versions that sampled the parts of a call that train."""
        return {version for version, _, _ in self.within(call_id, spans)}


EVERYTHING = Verdict()


def check_ranges(ranges: Sequence[Range], n_output: int) -> str | None:
    """Why `ranges` are not ascending, disjoint ranges of `n_output` tokens; None if they are."""
    before = 0
    for start, end in ranges:
        if not before <= start < end <= n_output:
            return f"[{start}, {end}] is no range of its {n_output} tokens after token {before}"
        before = end
    return None

"""Cuts a forest into runs: what a layer with a state computes in one call. Pure.

A chain (attention/pieces.py) is a run of tokens without a branch. The state after a chain is where each of its children
starts. Chains with children are computed first, one after another, parents before children. The chains without children
need no state after their last token, so several are computed in one call, padded at the end to one length:

    tokens     a b c d │ e f g │ h i        (two answers, efg and hi, to the prompt abcd)
    runs       [abcd],  [efg, hi·]          (· is padding)

A run that starts from a state has at least two tokens, because transformers computes a single one by kernels for
generation, which have no gradients. A chain of one token that has a parent and children is therefore no run of its own:
each child starts one token earlier, with the state before that token.

A convolution over the last k tokens has no state but its inputs. It is one call over a line in which every chain
follows the k − 1 tokens before it:

    tokens     a b c d │ e f g │ h i        (k = 3)
    line       · · a b c d  c d e f g  c d h i

R: sequences of a run, L: its longest, C: chains, N: tokens of the forest, E: tokens of a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.trainer.attention.pieces import Chain

Int64 = npt.NDArray[np.int64]

FEWEST = 2
"""Tokens of a run that starts from a state."""
PADDED = 2
"""The longest sequence of a run is at most this many times its shortest."""
NO_STATE = -1
"""In place of a chain, for a sequence that starts without a state."""


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences that are computed in one call. All start from a state, or none does."""

    tokens_RL: Int64  # places in the forest; a shorter sequence repeats its last token
    before: tuple[int, ...]  # per sequence, the chain whose state it starts from, or NO_STATE
    after: int  # the chain whose state is kept after the only sequence, or NO_STATE

    @property
    def starts_from_states(self) -> bool:
        """Whether its sequences continue chains."""
        return self.before[0] != NO_STATE


@dataclass(frozen=True, slots=True)
class Line:
    """A forest as one sequence in which every chain follows the tokens that its convolution sees."""

    tokens_E: Int64  # places in the forest
    given_E: npt.NDArray[np.bool_]  # False where a root's chain has nothing before it
    places_N: Int64  # the place of each token in the line


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a run."""

    tokens: list[int]
    before: int


def runs(chains: Sequence[Chain]) -> list[Run]:
    """The runs of a forest; a run comes after those whose states it starts from."""
    lent = _lent(chains)
    inner, leaves = [], []
    for i, chain in enumerate(chains):
        if lent[i]:
            continue
        tokens, before = [*range(chain.start, chain.stop)], chain.parent
        if before >= 0 and lent[before]:
            tokens, before = [chains[before].start, *tokens], chains[before].parent
        if chain.end > chain.stop:
            inner.append(_run([_Sequence(tokens, before)], after=i))
        else:
            leaves.append(_Sequence(tokens, before))
    return inner + [_run(part, after=NO_STATE) for part in _alike(leaves)]


def places(found: Sequence[Run], tokens: int) -> Int64:
    """(N,) the place of each token in the outputs of all runs, one after another, each (R · L,)."""
    whole = np.concatenate([run.tokens_RL.reshape(-1) for run in found])
    _, first = np.unique(whole, return_index=True)  # a token's first place; padding follows it
    assert len(first) == tokens
    return first


def line(chains: Sequence[Chain], kernel: int) -> Line:
    """The forest for a convolution over `kernel` tokens."""
    tokens: list[int] = []
    given: list[bool] = []
    own: list[int] = []
    for chain in chains:
        seen = _last(chains, chain.parent, kernel - 1)
        absent = kernel - 1 - len(seen)
        tokens += [0] * absent + seen
        given += [False] * absent + [True] * (len(seen) + chain.stop - chain.start)
        own += range(len(tokens), len(tokens) + chain.stop - chain.start)
        tokens += range(chain.start, chain.stop)
    return Line(np.array(tokens, np.int64), np.array(given, np.bool_), np.array(own, np.int64))


def _last(chains: Sequence[Chain], i: int, count: int) -> list[int]:
    """The last `count` tokens up to the end of chain `i`, or all if there are fewer."""
    found: list[int] = []
    while i >= 0 and len(found) < count:
        chain = chains[i]
        found = [*range(max(chain.start, chain.stop - count + len(found)), chain.stop), *found]
        i = chain.parent
    return found


def _lent(chains: Sequence[Chain]) -> list[bool]:
    """Per chain, whether it is computed with each of its children: it has one token, and starts from a state."""
    lent: list[bool] = []
    for chain in chains:
        short = chain.stop - chain.start < FEWEST and chain.end > chain.stop
        lent.append(short and chain.parent >= 0 and not lent[chain.parent])
    return lent


def _alike(leaves: Sequence[_Sequence]) -> Iterator[list[_Sequence]]:
    """Parts that start alike, from states or not, and are of similar length."""
    part: list[_Sequence] = []
    for leaf in sorted(leaves, key=lambda leaf: (leaf.before == NO_STATE, -len(leaf.tokens))):
        fits = part and (part[0].before == NO_STATE) == (leaf.before == NO_STATE)
        if part and not (fits and len(part[0].tokens) <= PADDED * len(leaf.tokens)):
            yield part
            part = []
        part.append(leaf)
    if part:
        yield part


def _run(part: Sequence[_Sequence], after: int) -> Run:
    starts = part[0].before != NO_STATE
    longest = max(FEWEST if starts else 1, *(len(s.tokens) for s in part))
    rows = [s.tokens + s.tokens[-1:] * (longest - len(s.tokens)) for s in part]
    return Run(np.array(rows, np.int64), tuple(s.before for s in part), after)

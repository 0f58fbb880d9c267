"""Seeds of single calls, for engines that sample each call by its own seed (`engine.deterministic`).

    run's seed ─┐
    session's place (data cursor and sample, or evaluation's episode) ─┼─► digest ─► seed
    prompt's digest ─┤
    how often the session has sent this prompt ─┘

No part depends on time, on the call's id or on other calls: two runs with one seed ask for the same samples.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from agentrl.engine.sampling_params import MAX_SEED
from agentrl.proxy.recent import Recent
from agentrl.proxy.run_store import RunStore
from agentrl.store.sessions.session_lookup import place_of


@dataclass(slots=True)
class _Asked:
    """The prompts of a session, as far as this process has seen them."""

    place: str
    prompts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class CallSeeds:
    """Gives every call of a run its seed. Sessions at the same place in two runs with one seed get the same seeds."""

    run_seed: int
    store: RunStore
    _asked: Recent[_Asked] = field(default_factory=Recent)

    async def of(self, session_id: str, prompt_digest: str) -> int:
        """The seed of the session's next call with this prompt."""
        asked = self._asked.get(session_id)
        if asked is None:
            place = await self.store.read(place_of, session_id)
            asked = self._asked.setdefault(session_id, _Asked(place))
        number = asked.prompts[prompt_digest]
        asked.prompts[prompt_digest] += 1
        return call_seed(self.run_seed, asked.place, prompt_digest, number)


def call_seed(run_seed: int, place: str, prompt_digest: str, number: int) -> int:
    """The seed of a call, from 0 to MAX_SEED."""
    named = f"{run_seed}/{place}/{prompt_digest}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") & MAX_SEED

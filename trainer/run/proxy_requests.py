"""Requests to the proxy that rank 0 repeats until they are done, while the other ranks wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agentrl.trainer.publish.offers import Offers
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run.trainer_state import Trainer

WAITING = "rank 0 waits"
"""The value that rank 0 shares while it tries, so that the collectives of the other ranks do not time out."""


def ask(t: Trainer, request: Callable[[Publisher, Callable[[], None]], bool], offers: Offers | None = None) -> bool:
    """The result of `request` of rank 0, on every rank. Collective.

    `request` gets a function to call after each attempt that failed: rank 0 then shares WAITING, and None at the end.
    It may use `offers`, with which the other ranks then help.
    """
    done = False
    if t.publisher is not None:
        try:
            done = request(t.publisher, partial(t.world.share, WAITING))
        finally:
            t.world.share(None)
    else:
        while (word := t.world.share(None)) is not None:
            if offers is not None:
                offers.help(word)
    return bool(t.world.share(done))

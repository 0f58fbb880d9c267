"""Decides which files a version gets: all tensors, what changed since the version before, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.configs.publish_config import PublishConfig

HALF = 2
"""Bytes of a number in 16-bit types, in which most small updates change no bit."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`whole`: files with all tensors. `delta`: what changed; ranks then keep their shares for the next version's."""

    whole: bool = True
    delta: bool = False


def wanted(config: PublishConfig, item_bytes: int, prepares: Callable[[], bool], since_whole: int | None) -> Wanted:
    """The files of the next version.

    `item_bytes` is the size of a number in engines, and `since_whole` the number of versions since the last one with
    whole files; None where the trainer does not hold the version before. `prepares` says whether all engines can
    prepare a version; it is called only where that decides.
    """
    if config.transport == "checkpoint_engine":  # it sends files with whole tensors
        return Wanted()
    if config.delta == "never" or (config.delta == "auto" and item_bytes != HALF):
        return Wanted()
    can_prepare = prepares()
    if config.delta == "auto" and not can_prepare:
        return Wanted()
    is_anchor = since_whole is None or since_whole + 1 >= config.anchor_every
    return Wanted(whole=is_anchor or not can_prepare, delta=True)


def is_too_large(delta_bytes: int, whole_bytes: int, config: PublishConfig) -> bool:
    """Whether engines should read a whole version in place of this delta."""
    return delta_bytes > config.delta_above * whole_bytes

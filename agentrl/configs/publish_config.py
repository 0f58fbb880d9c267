"""The section `publish`: how engines get new weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.configs.section import Seconds, Section


class PublishConfig(Section):
    """How engines get new weights. An adapter that is published as such always comes from its folder."""

    transport: Literal["disk", "distributed", "tensor"] = "disk"
    """`disk`: from a folder that they share with the trainer, one after another; `distributed`: the trainer broadcasts
    to all of them at once, over gloo or NCCL; `tensor`: through the memory of a host that they share with the trainer.
    Where the last two fail, from the folder."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """What becomes of running calls: `retract`: they go on with the new weights, their prefix computed again;
    `in_place`: with what is in the cache, computed by the old weights; `abort`: they are resubmitted by the proxy."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024
    """Tensors are sent in buckets of about so many bytes."""
    timeout_s: Seconds = 60.0
    """An engine that has not taken a bucket after so long reads the folder."""
    update_timeout_s: Seconds = 180.0
    """An engine that takes longer for all of it, the folder too, has failed: it does not serve before it has it."""
    verify: bool = True
    """Compare digests of the engines' weights with the trainer's before they go on. Only engines of one rank on a CPU
    tell digests that the trainer can compute; of others nothing is compared, which each publish says (`unverified`)."""

"""The section `publish`: how engines receive new weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.configs.section import Seconds, Section


class PublishConfig(Section):
    """How engines receive new weights. An adapter (`lora.publish: adapter`) always comes from its folder."""

    transport: Literal["disk", "distributed", "tensor"] = "disk"
    """`disk`: from a shared folder; `distributed`: a broadcast to all engines, over gloo or
    NCCL; `tensor`: through shared memory, on the trainer's host. When the last two fail, engines read the folder.
    """
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """Treatment of running calls: `retract`: continue with the new weights and recompute the prefix; `in_place`:
    continue with the cache of the old weights; `abort`: the proxy resubmits them.
    """
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 32
    """Maximum number of engines that load a version at once. At most a quarter of the serving engines do, so that the
    others serve; with fewer than eight, one after another. A broadcast is not limited. Where the disk is the limit,
    more engines at once are paused for longer.
    """
    bucket_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024
    """Approximate size of a bucket of tensors."""
    timeout_s: Seconds = 60.0
    """Timeout of a bucket; the engine then reads the folder."""
    update_timeout_s: Seconds = 180.0
    """Timeout of a whole update, including the folder. The engine then stays out of service until it has
    the weights.
    """
    verify: bool = True
    """Compare digests of the engines' weights with the trainer's before they serve. The trainer can compute digests
    only for one-rank engines on a CPU; a publish to other engines is reported as `unverified`.
    """

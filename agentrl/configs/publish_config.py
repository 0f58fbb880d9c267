"""The sections `publish` and `storage`: how engines receive new weights, and where files are kept beside the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentrl.configs.section import NonNegative, Seconds, Section


class MooncakeAddress(Section):
    """How a host reaches a Mooncake store."""

    master: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:\[\]-]{1,255}:[0-9]{1,5}$")]
    """`HOST:PORT` of the store's master (`mooncake_master`)."""
    metadata: Annotated[str, Field(min_length=1, max_length=1000)] = "P2PHANDSHAKE"
    """The store's metadata server; `P2PHANDSHAKE`: none."""
    protocol: Literal["rdma", "tcp", "efa"] = "rdma"
    """How bytes move between hosts."""
    devices: Annotated[str, Field(max_length=1000)] = ""
    """Network devices, for example `mlx5_0,mlx5_1`; empty: the store chooses them."""


class MooncakeConfig(MooncakeAddress):
    """A Mooncake store, in whose memory engines' hosts find version files. Needs `agentrl[mooncake]`."""

    segment_gb: Annotated[float, Field(ge=0, le=100_000)] = 0.0
    """Memory that each trainer rank gives to the store, in 10⁹ bytes; with 0 other hosts must give it."""


class PublishConfig(Section):
    """How engines receive new weights. An adapter (`lora.publish: adapter`) always comes from its folder."""

    transport: Literal["disk", "distributed", "tensor", "checkpoint_engine"] = "disk"
    """`disk`: from a shared folder; `distributed`: a broadcast to all engines, over gloo or
    NCCL; `tensor`: through shared memory, on the trainer's host; `checkpoint_engine`: by that package, where each GPU
    of the trainer has one rank of an engine. When the last three fail, engines read the folder.
    """
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """Treatment of running calls: `retract`: continue with the new weights and recompute the prefix; `in_place`:
    continue with the cache of the old weights; `abort`: the proxy resubmits them.
    """
    prepare: bool = True
    """Let engines fetch and verify a version while they serve another one, and pause them only for the swap. Needs
    engines that `agentrl` started, and memory for a second copy of the weights on each. An engine that cannot do this
    loads the version while it is paused.
    """
    shadow: Literal["auto", "gpu", "host"] = "auto"
    """Where an engine on a GPU keeps the second copy of its weights: `gpu`, from where the swap takes about a
    millisecond; `host`, from where the weights are copied over the bus during the swap; `auto`: on the GPU where it
    takes at most half of the memory that is free after the engine's start. For a larger model, `gpu` and a lower
    `engine.memory_fraction` make room.
    """
    serving_share: Annotated[float, Field(ge=0, le=1)] = 0.75
    """Share of the serving engines that keep taking calls during a publish. Where the share allows no engine to pause,
    one pauses at a time. A broadcast pauses all its members.
    """
    parallel: Annotated[int, Field(ge=1, le=1024)] = 32
    """Maximum number of engines that read a version from files or object storage at once, paused or not. Where the
    disk is the limit, more engines at once take longer each.
    """
    fan_out: Annotated[int, Field(ge=1, le=64)] = 2
    """Maximum number of hosts to which one host of engines, or a proxy, sends a version at a time."""
    lag: NonNegative = 0
    """Number of versions that an engine may be behind the run while it finishes its calls. With 0 a publish swaps every
    engine before the run moves. Admission counts the lag: `trainer.max_staleness` minus it must not be negative.
    """
    peers: Literal["http", "nixl"] = "http"
    """How engines' hosts read versions from each other: over HTTP, or from each other's memory through NIXL. A host
    without `agentrl[nixl]` reads over HTTP in any case.
    """
    mooncake: MooncakeConfig | None = None
    """Also put each version's files into a Mooncake store, where hosts of engines read them first; null: do not."""
    delta: Literal["auto", "always", "never"] = "auto"
    """Files that hold only what changed since the version before. `auto`: where engines compute in 16 bits and all of
    them can prepare a version while they serve another. Each rank of the trainer then keeps its share of the newest
    version in host memory, in the engines' type.
    """
    anchor_every: Annotated[int, Field(ge=1, le=1000)] = 20
    """Every N-th version also has files with all tensors, with which new engines begin."""
    delta_above: Annotated[float, Field(gt=0, le=1)] = 0.3
    """A delta that is larger than this share of all tensors is replaced by files with all tensors."""
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


class StorageConfig(Section):
    """Object storage that hosts share. Its keys and its address come from the environment
    ([storage](storage.md#object-storage)).
    """

    url: str | None = None
    """`s3://BUCKET/PREFIX` or `file:///FOLDER`: checkpoints are copied there, and a host without the run's folder
    resumes from them; null: the run's folder is the only place.
    """
    weights: bool = False
    """Also copy each version's weights to `url` before it is published. Engines that `agentrl engine --config` starts
    on a host without the run's folder read them there.
    """
    cache_dir: Path | None = None
    """This host's folder of files that were read from object storage; null: `$AGENTRL_CACHE/storage`, by default
    `~/.cache/agentrl/storage`.
    """
    cache_gb: Annotated[float, Field(gt=0)] = 100.0
    """Size of the cache, in 10⁹ bytes. Entries that were not used for the longest time are deleted first."""

    @field_validator("url")
    @classmethod
    def _is_storage(cls, value: str | None) -> str | None:
        return value if value is None else storage_url(value)

    @model_validator(mode="after")
    def _weights_have_a_place(self) -> Self:
        if self.weights and self.url is None:
            raise ValueError("weights: true needs storage.url")
        return self

    def weights_url(self, run: str) -> str | None:
        """Where a run's versions are; None when they are not copied."""
        return f"{self.url}/{run}/weights" if self.weights else None


def storage_url(value: str) -> str:
    """Return a URL of object storage without a trailing slash. Raises ValueError for any other, or one with a key."""
    parts = urlsplit(value)
    if "@" in value:
        raise ValueError("must not contain a key, because it is stored with the run: set AWS_ACCESS_KEY_ID")
    named = parts.netloc if parts.scheme == "s3" else parts.path.startswith("/") and not parts.netloc
    if parts.scheme not in ("s3", "file") or not named or parts.query or parts.fragment or ".." in parts.path:
        raise ValueError(f"must be s3://BUCKET/PREFIX or file:///FOLDER, got {value!r}")
    return value.rstrip("/")

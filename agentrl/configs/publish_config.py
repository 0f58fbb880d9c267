"""The sections `publish` and `storage`: how engines receive new weights, and where files are kept beside the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

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

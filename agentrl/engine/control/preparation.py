"""Orders to prepare a version, and the state of the preparation: the bodies of the `/agentrl/` routes.

none ──prepare──► fetching ──► staging ──► ready ──swap──► none
                      └───────────┴──► failed                     prepare of another name: fetching
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.configs.section import Section
from agentrl.domain.schemas import Json
from agentrl.errors import EngineError
from agentrl.versions.weights_folder import version_of

PREPARE = "/agentrl/prepare"
PREPARED = "/agentrl/prepared"
DIGESTS = "/agentrl/prepared/digests"
SWAP = "/agentrl/swap"
VERSIONS = "/agentrl/versions/"
SHADOW_MEMORY = "AGENTRL_SHADOW_MEMORY"
"""Variable with `publish.shadow`, for the processes of SGLang's schedulers."""
UNDEFINED = "undefined"
"""The label of an engine whose weights are of no version, because a swap failed in the middle. It is paused."""
MOST_SOURCES = 64
MOST_ERROR = 500
"""Characters of an error that are reported."""
Version = Annotated[int, Field(ge=0, lt=1 << 31)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Named(Section):
    version: Version
    name: Name

    @model_validator(mode="after")
    def _is_a_version(self) -> _Named:
        if version_of(self.name) != self.version:
            raise ValueError(f"{self.name!r} is not the folder of version {self.version}")
        return self


class Order(_Named):
    """A version to prepare: where to read it, in the order of preference, and the checksum of its tensors."""

    checksum: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    sources: Annotated[list[Json], Field(min_length=1, max_length=MOST_SOURCES)]  # of versions.version_sources
    digests: bool = False  # also compute the digests of the staged weights, by which a proxy verifies them


class Swap(_Named):
    """The staged version that should replace the one in use."""

    flush_cache: bool = True


class PreparationState(StrEnum):
    """How far a preparation is."""

    NONE = "none"
    FETCHING = "fetching"
    STAGING = "staging"
    READY = "ready"
    FAILED = "failed"


class Preparation(BaseModel):
    """The version that an engine prepares while it serves another."""

    model_config = ConfigDict(frozen=True)

    name: str | None = None
    version: int | None = None
    checksum: str | None = None
    state: PreparationState = PreparationState.NONE
    error: str | None = None
    bytes: int = 0  # that were read from sources
    fetch_s: float = 0.0
    stage_s: float = 0.0
    serves_versions: bool = True  # other hosts may read the versions in this host's cache

    def is_ready(self, name: str) -> bool:
        """Whether this version can be swapped in."""
        return self.state is PreparationState.READY and self.name == name


def preparation_of(answer: Json, where: str) -> Preparation:
    """An engine's answer. Raises EngineError for an invalid one."""
    try:
        return Preparation.model_validate(answer)
    except ValidationError as error:
        raise EngineError(f"{where} reports no preparation: {problem(error)}") from error


def problem(error: ValidationError) -> str:
    """The first problem of an invalid body, in one line."""
    first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}"[:MOST_ERROR] if field else str(first["msg"])[:MOST_ERROR]

"""What a run's datasets in object storage contain: recorded when the run is created, compared when it is resumed."""

from __future__ import annotations

from agentrl.configs.episodes.task_sources import sources_of
from agentrl.configs.run_config import RunConfig
from agentrl.data.hub_files import SCHEME
from agentrl.domain.schemas import Json
from agentrl.errors import ConfigError
from agentrl.storage import datasets
from agentrl.store import Connection, events

DATASETS = "datasets"
"""Kind of the event that records them: for each key of the configuration its URL, SHA-256, size and ETag."""
READ_AT_EVERY_START = ("evaluation.tasks", "evaluation.unseen_tasks")
"""Keys of datasets that are not copied into the database."""


def facts_of(config: RunConfig) -> dict[str, Json]:
    """The datasets of a configuration that are in object storage. Raises ConfigError and StorageError."""
    evaluation = config.evaluation
    specs = (config.tasks, evaluation.tasks, evaluation.unseen_tasks)
    found: dict[str, Json] = {}
    for key, spec in zip(("tasks", *READ_AT_EVERY_START), specs, strict=True):
        sources = sources_of(spec)
        for source in sources:
            if datasets.is_remote(source.path) and not source.path.startswith(SCHEME):
                with datasets.opened(source.path, config.storage, key) as read:
                    size, sha256 = read.facts.size_bytes, read.facts.sha256
                    name = key if len(sources) == 1 else f"{key}.{source.label}"
                    found[name] = {"url": source.path, "sha256": sha256, "size_bytes": size, "etag": read.etag}
    return found


def record(conn: Connection, run_id: str, found: dict[str, Json]) -> None:
    """Record the datasets of a new run."""
    if found:
        events.record(conn, run_id, DATASETS, found, "train")


def check_unchanged(conn: Connection, run_id: str, found: dict[str, Json]) -> None:
    """Raise ConfigError when an evaluation's dataset has other content than when the run was created."""
    recorded = [event.data for event in events.of_run(conn, run_id, DATASETS)] or [{}]
    for key in sorted(found):
        if not key.startswith(READ_AT_EVERY_START):
            continue
        before, now = (facts.get(key, {}).get("sha256") for facts in (recorded[0], found))
        if before != now and before is not None and now is not None:
            raise ConfigError(
                f"{key}: {found[key]['url']} has changed since the run was created (its SHA-256 was {before}, now it "
                f"is {now}): restore it, or give another name"
            )

"""Which processes of a run use its object storage, and so get the access to it."""

from __future__ import annotations

from typing import Any, Literal

from agentrl.configs.episodes.task_sources import sources_of
from agentrl.configs.run_config import RunConfig

User = Literal["supervisor", "engine", "trainer", "rollout"]
BUCKET = "s3://"


def storage_users(config: RunConfig) -> frozenset[User]:
    """The users of a bucket: the trainer writes checkpoints and versions, engines read versions, rollout workers the
    tasks of evaluations, and the supervisor all of them. Empty for a run without a bucket.
    """
    users: set[User] = set()
    if _in_bucket(config.storage.url):
        users.add("trainer")
        users |= {"engine"} if config.storage.weights else set()
    if _in_bucket(*_paths(config.evaluation.tasks), *_paths(config.evaluation.unseen_tasks)):
        users.add("rollout")
    if users or _in_bucket(*_paths(config.tasks)):
        users.add("supervisor")
    return frozenset(users)


def _in_bucket(*urls: str | None) -> bool:
    return any(url is not None and url.startswith(BUCKET) for url in urls)


def _paths(tasks: Any) -> list[str]:
    return [source.path for source in sources_of(tasks)]

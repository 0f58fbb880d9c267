"""Audit of a run's versions and steps: one chain survives, numbers are never reused, states fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from agentrl.domain.schemas import TRAINED, StepState, VersionState
from agentrl.store import runs
from agentrl.store.tables import steps, weight_versions

_VERSION_OF_STEP = {
    StepState.TRAINED: VersionState.PENDING,
    StepState.PUBLISHED: VersionState.PUBLISHED,
    StepState.ROLLED_BACK: VersionState.ROLLED_BACK,
}


@dataclass(frozen=True, slots=True)
class Lineage:
    """A run with its versions and steps, for lookups by every other check."""

    run: Row[Any]
    versions: dict[int, Row[Any]]
    steps: dict[str, Row[Any]]
    parted: dict[int, int]  # version → how many updates of the surviving chain it contains
    discounts: set[float]  # every γ that the run may have computed returns with

    @classmethod
    def read(cls, conn: Connection, run_id: str) -> Lineage:
        """Read the run, its versions and its steps."""
        run = runs.get(conn, run_id)
        versions = {
            row.version: row
            for row in conn.execute(
                select(weight_versions).where(weight_versions.c.run_id == run_id).order_by(weight_versions.c.version)
            )
        }
        of_run = select(steps).where(steps.c.run_id == run_id).order_by(steps.c.step, steps.c.started_at)
        by_id = {row.id: row for row in conn.execute(of_run)}
        parted: dict[int, int] = {}
        for version, row in versions.items():  # a parent has a smaller number
            above = parted.get(row.parent_version, 0)
            parted[version] = above if row.state == VersionState.ROLLED_BACK else above + (version != 0)
        configured = run.config.get("rollout", {}).get("turn_discount", 1.0)
        return cls(run, versions, by_id, parted, {configured} | {step.turn_discount for step in by_id.values()})

    @property
    def replays_routing(self) -> bool:
        """Whether the run records the experts of its training calls."""
        return bool(self.run.config.get("trainer", {}).get("routing_replay", "off") == "engine")

    @property
    def surviving(self) -> list[Row[Any]]:
        """Steps that were not rolled back, in order."""
        return [step for step in self.steps.values() if step.state != StepState.ROLLED_BACK]

    def age(self, version: int, step: Row[Any]) -> int | None:
        """A version's age at a surviving step: updates of the step's chain since that version; None if unknown."""
        if version not in self.parted or step.version_before not in self.parted:
            return None
        return max(0, self.parted[step.version_before] - self.parted[version])


def check(lineage: Lineage) -> Iterator[str]:
    """Violations in the versions and steps of a run, and in its current version and step."""
    yield from _versions(lineage)
    yield from _steps(lineage)
    yield from _position(lineage)


def _versions(lineage: Lineage) -> Iterator[str]:
    versions = lineage.versions
    made_by: dict[int, list[Row[Any]]] = {}
    for step in lineage.steps.values():
        if step.version_after is not None:
            made_by.setdefault(step.version_after, []).append(step)
    if missing := sorted(set(range(max(versions, default=0) + 1)) - set(versions)):
        yield f"weight_versions {missing[0]}: it is missing, though later versions exist"
    for version, row in versions.items():
        name = f"weight_versions {version}"
        if version == 0:
            if (row.parent_version, row.step, row.state) != (None, 0, VersionState.PUBLISHED):
                yield f"{name}: the base weights are {row.state}, of step {row.step}, parent {row.parent_version}"
            continue
        parent = versions.get(row.parent_version)
        if parent is None or parent.version >= version:
            yield f"{name}: its parent {row.parent_version} is no earlier version"
        elif row.step != parent.step + 1:
            yield f"{name}: it is of step {row.step}, but its parent is of step {parent.step}"
        elif row.state != VersionState.ROLLED_BACK and parent.state == VersionState.ROLLED_BACK:
            yield f"{name}: it is {row.state}, but its parent {parent.version} was rolled back"
        if row.state == VersionState.PUBLISHED and row.published_at is None:
            yield f"{name}: it is published, but has no time of publication"
        makers = made_by.get(version, [])
        if len(makers) != 1:
            yield f"{name}: {len(makers)} steps made it"
        elif (makers[0].step, makers[0].version_before) != (row.step, row.parent_version):
            yield f"{name}: it is not what step {makers[0].id} made from version {makers[0].version_before}"


def _steps(lineage: Lineage) -> Iterator[str]:
    before, epoch, newest = 0, 0, len(lineage.surviving)
    for number, step in enumerate(lineage.surviving, 1):
        name = f"steps {step.id}"
        if step.step != number:
            yield f"{name}: it is step {step.step}, but number {number} of the surviving steps"
        if step.version_before != before:
            yield f"{name}: it starts from version {step.version_before}, but the step before it made {before}"
        if step.epoch < epoch:
            yield f"{name}: its epoch {step.epoch} is older than that of the step before it"
        if step.state == StepState.STARTED and number != newest:
            yield f"{name}: it is started, but later steps exist"
        before, epoch = step.version_after, step.epoch
    for step in lineage.steps.values():
        name = f"steps {step.id}"
        if step.version_before not in lineage.versions:
            yield f"{name}: it starts from version {step.version_before}, which does not exist"
        if step.epoch > lineage.run.trainer_epoch:
            yield f"{name}: its epoch {step.epoch} is newer than the run's, {lineage.run.trainer_epoch}"
        if step.state in TRAINED and (step.version_after is None or step.trained_at is None):
            yield f"{name}: it is {step.state}, but made no version"
        if step.state == StepState.STARTED and (step.version_after is not None or step.trained_at is not None):
            yield f"{name}: it is started, but made version {step.version_after}"
        if step.version_after is None:
            continue
        version = lineage.versions.get(step.version_after)
        if version is None:
            yield f"{name}: it made version {step.version_after}, which does not exist"
        elif step.state in _VERSION_OF_STEP and version.state != _VERSION_OF_STEP[step.state]:
            yield f"{name}: it is {step.state}, but its version {version.version} is {version.state}"


def _position(lineage: Lineage) -> Iterator[str]:
    run, name = lineage.run, f"runs {lineage.run.id}"
    done = [0, *(step.step for step in lineage.surviving if step.state in TRAINED)]
    published = max([0, *(step.step for step in lineage.surviving if step.state == StepState.PUBLISHED)])
    if run.published_step not in done or run.published_step < published:
        yield f"{name}: published_step is {run.published_step}, but its steps are published up to {published}"
    current = lineage.versions.get(run.current_version)
    if current is None:
        yield f"{name}: current_version is {run.current_version}, which does not exist"
    elif current.state == VersionState.PENDING or (
        current.state == VersionState.PUBLISHED and current.step != run.published_step
    ):
        yield (
            f"{name}: current_version {current.version} is {current.state}, of step {current.step}; "
            f"published_step is {run.published_step}"
        )

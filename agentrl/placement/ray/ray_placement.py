"""Places the task runners of a run on a Ray cluster.

    part ──► placement group `agentrl:RUN:PART`, a bundle a rank ──► actor `agentrl:RUN:PART:RANK` on its bundle

Groups and actors are detached: they live until `remove`, whatever happens to the program that made them, and any other
program finds them by name. When a node is lost, Ray places its bundles on another node and starts their actors there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.placement.capacity import Capacity, check_capacity
from agentrl.placement.part_spec import Need, PartSpec
from agentrl.placement.ray.ray_connection import NAMESPACE, connected
from agentrl.placement.ray.ray_runner import PYTHON, RayRunner
from agentrl.placement.scheduler import RunnerState, SchedulerUnavailable, runner_command

STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "one_per_host": "STRICT_SPREAD"}
SMALLEST_CPU = 0.001
"""Ray refuses a bundle of nothing."""
GB = 10**9
ANSWER_S = 2.0
"""How long `states` waits for the actors."""
POLL_S = 0.2


class RayPlacement:
    """A `Placement` (scheduler.py) on the cluster of `RAY_ADDRESS`, else on the one that this host belongs to."""

    moves_supervisor = False

    def __init__(
        self, run: str, folder: Path, command: Callable[[Path, str, int], Sequence[str]] = runner_command
    ) -> None:
        self._prefix = f"agentrl:{run}:"
        self._folder = folder.absolute()
        self._command = command
        self._asked: dict[str, Any] = {}  # actor → its answer that `states` waits for

    def check(self, parts: Sequence[PartSpec]) -> None:
        """Raise ConfigError, in one line, when the nodes of the cluster can never hold all parts at once."""
        ray = connected()
        check_capacity(parts, [_capacity(node["Resources"]) for node in ray.nodes() if node["Alive"]])

    def apply(self, parts: Sequence[PartSpec]) -> None:
        """Start the task runners that are missing. A part that now has another shape is taken away and placed anew."""
        ray = connected()
        for part in parts:
            group = self._group(part)
            for rank in range(part.ranks):
                command = self._command(self._folder, part.name, rank)
                ray.remote(RayRunner).options(
                    name=f"{self._prefix}{part.name}:{rank}",
                    namespace=NAMESPACE,
                    get_if_exists=True,
                    lifetime="detached",
                    max_restarts=-1,
                    num_cpus=_bundle(part.need).get("CPU", 0),
                    num_gpus=part.need.gpus,
                    memory=_bundle(part.need).get("memory"),
                    scheduling_strategy=_on_bundle(group, rank),
                ).remote([PYTHON if word == sys.executable else word for word in command], part.need.gpus, part.grace_s)

    def states(self) -> list[RunnerState]:
        """What Ray and the actors know of the run's task runners."""
        connected()
        from ray.exceptions import RayError

        try:
            return self._states()
        except RayError as error:
            raise SchedulerUnavailable(f"Ray does not answer: {' '.join(str(error).split())}") from error

    def _states(self) -> list[RunnerState]:
        import ray

        found = []
        for part, table in sorted(self._groups().items()):
            for rank in sorted(table["bundles"]):
                waits = table["state"] != "CREATED"
                reason = f"Ray: {table['state']}, {table['stats']['scheduling_state']}" if waits else ""
                found.append(RunnerState(part, rank, "waiting" if waits else "placed", reason=reason))
        actors = {state: self._ask(f"{self._prefix}{state.part}:{state.rank}") for state in found if not state.reason}
        if answers := [answer for answer in actors.values() if answer is not None]:
            ray.wait(answers, num_returns=len(answers), timeout=ANSWER_S)
        return [self._answered(state, actors[state]) if state in actors else state for state in found]

    def remove(self, *, kill: bool = False) -> None:
        """Take all task runners away: with `kill` at once, else when those that are placed have ended.

        A runner that refuses its input has no command, and never reads that it is to end.
        """
        while not kill and any(state.state == "placed" and not state.refusals for state in self.states()):
            time.sleep(POLL_S)
        self._remove()

    # -- placement groups ------------------------------------------------------------------------------------------

    def _group(self, part: PartSpec) -> Any:
        """The placement group of a part: the one that exists, if it has the part's shape, else a new one."""
        from ray.exceptions import RaySystemError
        from ray.util import get_placement_group, placement_group

        name = f"{self._prefix}{part.name}"
        bundles, strategy = [_bundle(part.need)] * part.ranks, STRATEGIES[part.spread]
        table = self._groups().get(part.name)
        if table is None or table["strategy"] != strategy or list(table["bundles"].values()) != bundles:
            self._remove(part.name)
            try:
                return placement_group(bundles, strategy=strategy, name=name, lifetime="detached")
            except RaySystemError as error:  # another program has just made it
                if "already exists" not in str(error):
                    raise
        return get_placement_group(name)

    def _groups(self) -> dict[str, Mapping[str, Any]]:
        """Part → what Ray knows of its placement group."""
        from ray.util import placement_group_table

        tables = placement_group_table().values()
        ours = [table for table in tables if table["name"].startswith(self._prefix) and table["state"] != "REMOVED"]
        return {table["name"].removeprefix(self._prefix): table for table in ours}

    def _remove(self, part: str | None = None) -> None:
        """Remove the actors and the placement group of a part, or of all parts."""
        import ray
        from ray.util import get_placement_group, remove_placement_group

        while actors := self._actors(part):
            for name in actors:
                with contextlib.suppress(ValueError):  # it is gone already
                    ray.kill(ray.get_actor(name, NAMESPACE), no_restart=True)
            time.sleep(POLL_S)
        for name in self._groups():
            if part in (None, name):
                with contextlib.suppress(ValueError):
                    remove_placement_group(get_placement_group(f"{self._prefix}{name}"))

    # -- actors ----------------------------------------------------------------------------------------------------

    def _actors(self, part: str | None = None) -> list[str]:
        """Names of the actors of a part, or of all parts."""
        from ray.util import list_named_actors

        prefix = self._prefix if part is None else f"{self._prefix}{part}:"
        return [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["name"].startswith(prefix)]

    def _ask(self, actor: str) -> Any:
        """The pending answer of an actor; None when there is no such actor. An actor is not asked twice at a time."""
        import ray

        if actor not in self._asked:
            try:
                self._asked[actor] = ray.get_actor(actor, NAMESPACE).state.remote()
            except ValueError:
                return None
        return self._asked[actor]

    def _answered(self, state: RunnerState, answer: Any) -> RunnerState:
        """The state of a runner whose bundle has a node, by the answer of its actor."""
        import ray
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

        if answer is None:
            return replace(state, state="waiting", reason="it has no Ray actor")
        try:
            ended, host, last, refusals = ray.get(answer, timeout=0)
        except GetTimeoutError:
            return replace(state, state="waiting", reason="Ray starts its actor")
        except ActorUnavailableError:
            ended, host, last, refusals = False, "", "Ray has lost its actor", 0
        except RayActorError as error:
            ended, host, last, refusals = False, "", " ".join(str(error).split()), 0
        self._asked.pop(f"{self._prefix}{state.part}:{state.rank}")
        name = "ended" if ended else "placed" if host else "waiting"
        return replace(state, state=name, host=host, reason=last, refusals=refusals)


def _bundle(need: Need) -> dict[str, float]:
    """What one process of a part needs, in Ray's words."""
    bundle = {"CPU": float(need.cpus), "GPU": float(need.gpus), "memory": float(int(need.memory_gb * GB))}
    return {name: amount for name, amount in bundle.items() if amount} or {"CPU": SMALLEST_CPU}


def _on_bundle(group: Any, rank: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)


def _capacity(resources: Mapping[str, float]) -> Capacity:
    """The resources of a node, by Ray's names."""
    return Capacity(resources.get("GPU", 0), resources.get("CPU", 0), resources.get("memory", 0) / GB)

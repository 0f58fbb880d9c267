"""Runs episodes of a verifiers environment (https://github.com/PrimeIntellect-ai/verifiers, 0.4) with our model.

Settings: `taskset` and `env`, the library's sections `[env.taskset]` and `[env]`; `sampling`; `traces`, a file to which
the record of each episode is appended. Agents run in the subprocess runtime unless `env` says otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from host_loop import main
from verifiers.v1.configs.agent import agent_config_fields

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # harnesses call `uv`


class EpisodeFailed(Exception):
    """An episode with an error. The message has the type and the text of each."""


class Verifiers:
    """An environment that serves many episodes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.keys = itertools.count()
        self.config = config_of(settings)
        self.env = vf.load_environment(self.config)
        self.serving: Any = None

    def tasks(self) -> Any:
        """The tasks of the taskset, as the library writes them."""
        for task in self.env.taskset:
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            yield {"verifiers": data, "data_source": self.config.taskset.id}

    async def play(self, request: dict[str, Any]) -> dict[str, float]:
        """Run an episode; returns the weighted rewards of its traces."""
        task_type = type(self.env.taskset).task_type()
        data = task_type.data_type().model_validate(request["task"]["verifiers"])
        task = task_type(data, self.config.taskset.task)
        variable = f"AGENTRL_API_KEY_{next(self.keys)}"  # the library reads keys from the environment only
        os.environ[variable] = request["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            sampling = vf.Sampling.model_validate(self.settings.get("sampling") or {})
            episode = await self.env.run_episode(task, vf.ModelContext("default", client, sampling))
        finally:
            del os.environ[variable]
        self.record(request, episode)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EpisodeFailed("; ".join(f"{one.type}: {one.message}" for one in errors) or "the episode is not ok")
        return rewards_of(episode)

    def record(self, request: dict[str, Any], episode: Any) -> None:
        """Append the episode, with its metrics, to the file of the settings."""
        if self.settings.get("traces"):
            session = request["base_url"].partition("/sessions/")[2].partition("/")[0]
            text = json.dumps({"session_id": session, **episode.to_record()})
            with open(self.settings["traces"], "a") as file:
                file.write(text + "\n")

    async def __aenter__(self) -> Verifiers:
        self.serving = self.env.serving()
        await self.serving.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.serving.__aexit__(*error)


def config_of(settings: dict[str, Any]) -> Any:
    """The environment's configuration, whose agents run on this machine."""
    taskset = settings["taskset"]
    given = {**(settings.get("env") or {}), "taskset": {"id": taskset} if isinstance(taskset, str) else taskset}
    local = dict(given)
    alone = vf.default_harness_id(given["taskset"]["id"]) == "bash"  # the library's default, which runs commands
    for role in agent_config_fields(vf.resolve_env_config(given)):
        chosen = dict(given.get(role) or {})
        chosen.setdefault("runtime", {"type": "subprocess"})
        if alone:
            chosen.setdefault("harness", {"id": "null"})
        local[role] = chosen
    return vf.resolve_env_config(local)


def rewards_of(episode: Any) -> dict[str, float]:
    """The weighted rewards, whose sum is the library's; with several agents as AGENT.NAME."""
    several = len({trace.agent.name for trace in episode.traces}) > 1
    found: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                label = f"{trace.agent.name}.{name}" if several else name
                found[label] = found.get(label, 0.0) + reward.value
    return found


if __name__ == "__main__":
    main(Verifiers)

"""Runs trials of Harbor tasks (https://harborframework.com, 0.24), whose agent calls our model, one at a time.

Settings: `tasks`, the folders of tasks, or a folder of such folders; `agent`, `environment` and `verifier`, the
library's sections of a trial; `trial`, its other fields; `trials_dir`; `proxy`, the address at which the environment's
containers reach agentrl's proxy. In the strings of `agent`, {base_url}, {anthropic_base_url} and {api_key} are the
session's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HARBOR_TELEMETRY", "0")

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.trial.trial import Trial
from host_loop import main

TASK_FILE = "task.toml"


class TrialFailed(Exception):
    """A trial with an exception, or without a reward."""


class Trials:
    """Trials of local tasks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def tasks(self) -> Iterator[dict[str, Any]]:
        """One for each folder with a task, in the order of their names."""
        given = self.settings["tasks"]
        for folder in map(Path, [given] if isinstance(given, str) else given):
            found = (
                [folder]
                if (folder / TASK_FILE).is_file()
                else sorted(file.parent for file in folder.glob(f"*/{TASK_FILE}"))
            )
            if not found:
                raise FileNotFoundError(f"{folder} has no {TASK_FILE}, and neither has a folder in it")
            for path in found:
                yield {"harbor": str(path.resolve()), "data_source": path.name}

    async def play(self, request: dict[str, Any]) -> dict[str, float]:
        """Run a trial; returns the verifier's rewards."""
        session = request["base_url"].partition("/sessions/")[2].partition("/")[0]
        address = request["base_url"]
        if self.settings.get("proxy"):
            address = f"{self.settings['proxy'].rstrip('/')}/sessions/{address.partition('/sessions/')[2]}"
        variables = {
            "base_url": address,
            "anthropic_base_url": address.removesuffix("/v1"),
            "api_key": request["api_key"],
        }
        given = filled(self.settings.get("agent") or {}, variables)
        given["env"] = of_session(variables) | dict(given.get("env") or {})
        given.setdefault("model_name", "openai/default")
        os.environ |= of_session(
            variables | {"base_url": request["base_url"]}
        )  # for agents that call from this process
        with tempfile.TemporaryDirectory(prefix="agentrl-harbor-") as folder:
            config = TrialConfig(
                task=TaskConfig(path=Path(request["task"]["harbor"])),
                trial_name=f"{Path(request['task']['harbor']).name[:40]}__{session}",
                trials_dir=Path(self.settings.get("trials_dir") or folder),
                agent=AgentConfig(**given),
                environment=EnvironmentConfig(**(self.settings.get("environment") or {})),
                verifier=VerifierConfig(**(self.settings.get("verifier") or {})),
                **(self.settings.get("trial") or {}),
            )
            result = await (await Trial.create(config)).run()
        if result.exception_info is not None:
            problem = result.exception_info
            raise TrialFailed(f"{problem.exception_type}: {problem.exception_message}")
        rewards = result.verifier_result and result.verifier_result.rewards
        if not rewards:
            raise TrialFailed("the verifier gave no reward")
        return {name: float(value) for name, value in rewards.items()}

    async def __aenter__(self) -> Trials:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


def of_session(variables: dict[str, str]) -> dict[str, str]:
    """The variables with which SDKs and agents find the session."""
    return {
        "OPENAI_BASE_URL": variables["base_url"],
        "OPENAI_API_BASE": variables["base_url"],
        "OPENAI_API_KEY": variables["api_key"],
        "ANTHROPIC_BASE_URL": variables["anthropic_base_url"],
        "ANTHROPIC_API_KEY": variables["api_key"],
    }


def filled(value: Any, variables: dict[str, str]) -> Any:
    """A value with the session's variables in its strings."""
    if isinstance(value, dict):
        return {key: filled(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, variables) for one in value]
    if isinstance(value, str):
        for name, text in variables.items():
            value = value.replace(f"{{{name}}}", text)
    return value


if __name__ == "__main__":
    main(Trials)

"""The user's code that a run calls: checked before a run starts, and digested when it is created and resumed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rollout.agent import READY_MADE
from agentrl.rollout.rewards.verifier_names import VERIFIERS
from agentrl.store import Connection, events
from agentrl.user_code import load_function, source_digest

CODE = "code"
"""Kind of the event that records it: for each key of the configuration the name and the SHA-256 of its source. A
resume with another source records all again, with the keys that `changed`.
"""


def check_functions(config: RunConfig) -> None:
    """Load the functions of the trainer, and look for the training script. Raises UserError when one is missing, or
    has other parameters.
    """
    for key, spec in _of_trainer(config).items():
        if spec is not None:
            load_function(spec, key)
    script = config.trainer.script
    if script is not None and not Path(script[0]).is_file():
        raise UserError(f"trainer.script: {script[0]} does not exist")


def facts_of(config: RunConfig) -> dict[str, Json]:
    """The code of a configuration, by its key."""
    named = {
        "agent": config.agent if isinstance(config.agent, str) else None,
        "rollout.accept": config.rollout.accept,
        **_of_trainer(config),
    }
    rewards = config.reward.functions if config.reward is not None else {}
    named |= {f"reward.{name}": one.function for name, one in rewards.items()}
    known = READY_MADE | VERIFIERS
    found: dict[str, Json] = {}
    for key, name in named.items():
        if name is not None:
            found[key] = {"name": name, "sha256": source_digest(known.get(name, name))}
    if config.trainer.script is not None:
        file = Path(config.trainer.script[0])
        found["trainer.script"] = {"name": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    return found


def _of_trainer(config: RunConfig) -> dict[str, str | None]:
    trainer = config.trainer
    return {
        "trainer.algorithm.loss": trainer.algorithm.loss,
        "trainer.algorithm.advantage": trainer.algorithm.advantage,
        "trainer.teacher_prompt": trainer.teacher_prompt if trainer.prompts_by_function else None,
    }


def record(conn: Connection, run_id: str, found: dict[str, Json]) -> list[str]:
    """Record the code of a start, if it is new. Returns a line for each key whose code has changed since the last."""
    recorded = [event.data for event in events.of_run(conn, run_id, CODE)]
    before: Json = recorded[-1]["keys"] if recorded else {}
    changed = [key for key in sorted(found) if key in before and before[key] != found[key]]
    if found and (not recorded or changed or before.keys() != found.keys()):
        events.record(conn, run_id, CODE, {"keys": found, "changed": changed}, "train")
    return [
        f"caution: {key}: the source of {found[key]['name']} has changed since the run's last start "
        f"(SHA-256 {_short(before[key])} before, {_short(found[key])} now); the run goes on with the new source"
        for key in changed
    ]


def _short(fact: Json) -> str:
    return (fact["sha256"] or "unknown")[:12]

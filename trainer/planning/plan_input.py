"""The input of a plan: the GPUs, the model's shape and the trajectories, from a configuration and from options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError, ModelFolderError, UserError, did_you_mean
from agentrl.models import BUILT_IN, resolve_model
from agentrl.trainer.metrics.devices import Device, labelled
from agentrl.trainer.planning.model_shapes import SHAPES
from agentrl.trainer.planning.workload import Workload

GPUS = re.compile(r"(\d{1,4})\s*[x×]\s*(\S+)", re.IGNORECASE)
MOST_BYTES = 2**20
DEFAULT_TOKENS = 8192
"""Tokens of a trajectory where neither the options nor the engines' configuration say how many."""
PROMPT_SHARE = 8
"""A prompt is one of so many equal parts of a trajectory, unless an option says otherwise."""
SHORTEST = 16


def gpus_of(text: str) -> tuple[int, Device]:
    """`8xH100-80`: the GPUs of a host. Raises UserError with the nearest valid choice."""
    found = GPUS.fullmatch(text.strip())
    if not found or not int(found[1]):
        raise UserError(f"--gpus {text!r} is no number and kind of GPUs such as 8xH100-80")
    return int(found[1]), labelled(found[2])


def shape_of(model: str) -> tuple[str, dict[str, Any]]:
    """The name and config.json of a model: a name of `SHAPES`, a built-in model, a folder or a config.json.

    Raises ModelFolderError.
    """
    by_name = {name.casefold(): name for name in SHAPES}
    if (name := by_name.get(model.rpartition("/")[2].casefold())) and not Path(model).exists():
        return name, dict(SHAPES[name])
    path = resolve_model(model) if model in BUILT_IN else Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        known = [*SHAPES, *BUILT_IN]
        raise ModelFolderError(
            f"no model {model!r}{did_you_mean(model, known)}; give a folder, a config.json or one of {', '.join(known)}"
        )
    if file.stat().st_size > MOST_BYTES:
        raise ModelFolderError(f"{file} has more than {MOST_BYTES:,} bytes: it is no config.json")
    try:
        shape = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{file} cannot be read: {error}") from error
    if not isinstance(shape, dict):
        raise ModelFolderError(f"{file} is no object")
    return path.name, _text_part(shape)


def _text_part(shape: dict[str, Any]) -> dict[str, Any]:
    """The language model of a config.json that describes more than that."""
    inner = shape.get("text_config")
    return inner if isinstance(inner, dict) and "num_hidden_layers" not in shape else shape


def workload_of(run: RunConfig, shape: dict[str, Any], tokens: int | None, prompt: int | None) -> Workload:
    """The trajectories of a step. Raises UserError for lengths that cannot be."""
    longest = shape.get("max_position_embeddings") or DEFAULT_TOKENS
    length = tokens or min(run.engine.context_length or DEFAULT_TOKENS, longest)
    shared = prompt if prompt is not None else max(1, length // PROMPT_SHARE)
    if length < SHORTEST or not 0 < shared <= length - SHORTEST // 2:
        raise UserError(f"--prompt {shared} of --tokens {length}: at least {SHORTEST // 2} tokens are sampled")
    if length > longest:
        raise UserError(f"--tokens {length} is more than the model's max_position_embeddings, {longest}")
    return Workload(length, shared, run.rollout.group_size, run.trainer.groups_per_step)


def trainer_ranks(run: RunConfig, total: int, nodes: int) -> int:
    """GPUs of the trainer: as configured, or else all of one host, or half of several.

    Raises ConfigError when the configured parts need more than there are.
    """
    sizes = run.resources
    needed = sizes.trainer.ranks, sizes.engines.count * sizes.engines.gpus
    if needed == (1, 1):
        return total if nodes == 1 else total // 2
    taken = max(needed) if sizes.colocated is not False and max(needed) <= total else sum(needed)
    if sum(needed) > total and taken > total:
        raise ConfigError(f"resources need {sum(needed)} GPUs (trainer {needed[0]}, engines {needed[1]}), not {total}")
    return sizes.trainer.ranks

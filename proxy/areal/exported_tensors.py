"""A session's recorded calls as AReaL's exports write them: tensors or lists, one item a call or a path.

individual   every call by itself: its prompt and its output
concat       every leaf with all calls that led to it; a call that several paths share is trained in the first
"""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agentrl.domain.schemas import PROMPT_VERSION, Json
from agentrl.store.sessions.areal_sessions import Path

Encoding = Literal["tensor", "list"]
TORCH_NAMES = {"int32": "torch.int32", "float32": "torch.float32", "bool": "torch.bool"}


def exported(paths: list[Path], *, each_call: bool, encoding: Encoding) -> Json:
    """The id of a path's last response → the exported item of that path."""
    encode = _tensor if encoding == "tensor" else _lists
    items = {path.response_ids[-1]: _individual(path) if each_call else _concat(path) for path in paths}
    for item in items.values():
        item["tensor_dict"] = {name: encode(array) for name, array in item["tensor_dict"].items()}
    return items


def _individual(path: Path) -> Json:
    t = path.tokens
    of_call = t.turn_ids == len(path.response_ids) - 1
    value = path.returns[-1]
    return {
        "interaction_id": path.response_ids[-1],
        "reward": value,
        "tensor_dict": _arrays(
            t.input_ids,
            t.loss_mask,
            np.where(of_call, t.logprobs, 0.0),
            np.where(of_call, t.versions, PROMPT_VERSION),
            value or 0.0,
        ),
    }


def _concat(path: Path) -> Json:
    """One path: `reward` is the episode's return, which baselines use; `turn_returns` has the return of each turn."""
    t = path.tokens
    return {
        "interaction_id": path.response_ids[-1],
        "reward": t.episode_return,
        "interaction_ids": path.response_ids,
        "turn_returns": path.returns,
        "tensor_dict": _arrays(t.input_ids, t.loss_mask, t.logprobs, t.versions, t.episode_return),
    }


def _arrays(
    ids: npt.NDArray[Any], mask: npt.NDArray[Any], logprobs: npt.NDArray[Any], versions: npt.NDArray[Any], value: float
) -> dict[str, npt.NDArray[Any]]:
    """AReaL's tensors of one sample: (1, T), and `rewards` (1,)."""
    rows = {
        "input_ids": ids.astype(np.int32),
        "loss_mask": mask.astype(np.int32),
        "logprobs": logprobs.astype(np.float32),
        "versions": versions.astype(np.int32),
        "attention_mask": np.ones(len(ids), np.bool_),
    }
    return {name: row[np.newaxis] for name, row in rows.items()} | {"rewards": np.array([value], np.float32)}


def _tensor(array: npt.NDArray[Any]) -> Json:
    """A tensor as AReaL's remote calls encode it."""
    data = base64.b64encode(array.tobytes()).decode()
    return {"type": "tensor", "data": data, "shape": list(array.shape), "dtype": TORCH_NAMES[array.dtype.name]}


def _lists(array: npt.NDArray[Any]) -> Any:
    return array.tolist()

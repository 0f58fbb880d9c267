"""The `/agentrl/` routes of an engine: what each answers, whatever server carries them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from agentrl.configs.section import Section
from agentrl.domain.schemas import Json
from agentrl.engine.control.preparation import DIGESTS, PREPARE, PREPARED, SWAP, Order, Swap, problem
from agentrl.engine.prepared.preparer import Preparer
from agentrl.errors import EngineError, NotPrepared
from agentrl.versions.version_sources import SOURCE_SPECS

ROUTES = frozenset({("POST", PREPARE), ("GET", PREPARED), ("GET", DIGESTS), ("POST", SWAP)})
PATHS = frozenset(path for _, path in ROUTES)
REPLACING = frozenset(
    {
        "/update_weights_from_disk",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/update_weights_from_ipc",
        "/release_memory_occupation",
    }
)
"""SGLang's routes that change the weights in use. What is staged may keep some of their tensors, so it is discarded."""
Body = TypeVar("Body", bound=Section)


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a JSON body."""

    status: int
    body: Json


async def answer(preparer: Preparer, method: str, path: str, body: bytes) -> Answer:
    """Answer a request whose path is in PATHS and whose body is bounded."""
    if (method, path) not in ROUTES:
        return _refusal(405, f"{method} is not allowed")
    try:
        if path == PREPARE:
            order = _parsed(Order, body)
            SOURCE_SPECS.validate_python(order.sources)
            return Answer(202, preparer.prepare(order).model_dump(mode="json"))
        if path == SWAP:
            return Answer(200, {"success": True, "swap_s": await preparer.swap(_parsed(Swap, body))})
        if path == DIGESTS:
            name, ranks = preparer.digests()
            return Answer(200, {"name": name, "ranks": ranks})
        return Answer(200, preparer.preparation().model_dump(mode="json"))
    except NotPrepared as error:
        return _refusal(409, str(error))
    except EngineError as error:
        return _refusal(500, str(error))
    except ValidationError as error:
        return _refusal(400, problem(error))
    except ValueError as error:
        return _refusal(400, str(error))


def _parsed(kind: type[Body], body: bytes) -> Body:
    """A body of one type. Raises ValueError for any other."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    make: Callable[[object], Body] = kind.model_validate
    return make(found)


def _refusal(status: int, message: str) -> Answer:
    return Answer(status, {"success": False, "message": message})

"""Errors for a request's parameters, and their translation into a dialect's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentrl.errors import RequestError
from agentrl.proxy.dialects.neutral_fields import Neutral

UNSUPPORTED = "unsupported_parameter"


ENGINE_REFUSED = "the engine refused the request: "


_LOG_STAMP = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


def translated(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with a dialect's `names` of parameters, and an engine's message without the prefix of its log."""
    message, param = str(error), error.param
    if error.code == "engine_rejected":
        said = " ".join(_LOG_STAMP.sub("", message.replace(ENGINE_REFUSED, "")).split())
        message = ENGINE_REFUSED + said
        if " grammar" in said:
            param = "tools" if "structural_tag grammar" in said else "json_schema"
    if param is not None and error.code != UNSUPPORTED:  # its `param` is already as the caller wrote it
        param = names.get(param, param)
    return RequestError(error.status, message, code=error.code, param=param, retry_after_s=error.retry_after_s)


def unsupported(param: str, message: str) -> RequestError:
    """A 400 for a parameter or value that agentrl does not support."""
    return RequestError(400, message, code=UNSUPPORTED, param=param)


def refuse(reasons: Mapping[str, str | bool]) -> None:
    """Raise RequestError 400 for the first parameter with a reason to refuse it; false means that there is none."""
    for param, reason in reasons.items():
        if reason:
            raise unsupported(param, f"{param} is not supported: {reason}")


def check_neutral(param: str, value: Any, neutral: Neutral) -> None:
    """Raise RequestError 400 for a value that is not neutral. None means that the parameter is absent."""
    if value is not None and not neutral.holds(value):
        raise unsupported(param, neutral.refusal(param))

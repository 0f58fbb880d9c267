"""The limits of a tool's calls, and how a long result is cut."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.configs.config_files import validated
from agentrl.configs.section import Positive, Seconds, Section
from agentrl.errors import ConfigError, UserError

MARK = "...(truncated)..."


class ToolLimits(Section):
    """Limits of the calls of a tool."""

    timeout_s: Seconds = 60.0
    """A call that takes longer is cancelled, and the model is told."""
    max_chars: Positive = 4096
    """A longer result is cut."""
    truncate: Literal["left", "right", "middle"] = "middle"
    """What is left of a long result, as in verl: its left end, its right end, or both ends without the middle."""
    on_error: Literal["tell", "fail"] = "tell"
    """What an unexpected exception of the tool does: the model is told, or the episode fails."""
    reward_weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """The tool's rewards are multiplied by this; 0: they are not recorded."""


def limits_of(values: dict[str, Any], field: str, base: ToolLimits | None = None) -> ToolLimits:
    """Limits with these values; those that are missing are those of `base`. Raises UserError."""
    try:
        return validated((base or ToolLimits()).model_dump() | values, ToolLimits)
    except ConfigError as error:
        raise UserError(f"{field}: {str(error).replace('config key ', '')}") from None


def cut(text: str, limits: ToolLimits) -> str:
    """A result as the model gets it: not longer than the limit and the mark, and only with characters that every
    database holds.
    """
    text = text.replace("\0", "\ufffd").encode(errors="replace").decode()
    longest = limits.max_chars
    if len(text) <= longest:
        return text
    if limits.truncate == "left":
        return text[:longest] + MARK
    if limits.truncate == "right":
        return MARK + text[-longest:]
    head = (longest + 1) // 2
    return text[:head] + MARK + text[len(text) - (longest - head) :]

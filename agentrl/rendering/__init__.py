"""Messages → ids, ids → messages, and the bridge from one turn to the next. Importing it loads no torch."""

from agentrl.rendering.base import (
    Bridge,
    ContentDelta,
    Delta,
    Opening,
    OutputParser,
    ParsedOutput,
    ReasoningDelta,
    Renderer,
    ToolCall,
    ToolCallDelta,
)
from agentrl.rendering.loading import load_renderer

__all__ = [
    "Bridge",
    "ContentDelta",
    "Delta",
    "Opening",
    "OutputParser",
    "ParsedOutput",
    "ReasoningDelta",
    "Renderer",
    "ToolCall",
    "ToolCallDelta",
    "load_renderer",
]

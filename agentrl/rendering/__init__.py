"""Messages → ids, ids → messages, and the bridge from one turn to the next. Importing it loads no torch."""

from agentrl.rendering.registry import load_renderer
from agentrl.rendering.renderer import (
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

"""Renders messages to token ids, parses sampled ids to messages, and extends a prompt by new turns. Imports
no torch.
"""

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

"""Names with which verl's tools and interactions run after a change of their import lines.

from verl.tools.base_tool import BaseTool                ──►  from agentrl.verl import BaseTool
from verl.tools.schemas import ToolResponse, …           ──►  from agentrl.verl import ToolResponse, …
from verl.utils.rollout_trace import rollout_trace_op    ──►  from agentrl.verl import rollout_trace_op
from verl.interactions.base import BaseInteraction       ──►  from agentrl.verl import BaseInteraction
"""

from agentrl.rollout.tools.users.base_interaction import BaseInteraction
from agentrl.rollout.tools.verl.base_tool import BaseTool, rollout_trace_op
from agentrl.rollout.tools.verl.openai_schemas import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

__all__ = [
    "BaseInteraction",
    "BaseTool",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "rollout_trace_op",
]

"""The APIs that the proxy speaks, by the path they are served at."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.proxy.dialects.anthropic_messages import AnthropicMessages
from agentrl.proxy.dialects.base import Dialect
from agentrl.proxy.dialects.openai_chat import OpenAIChat
from agentrl.proxy.dialects.openai_completions import OpenAICompletions
from agentrl.proxy.dialects.openai_responses import OpenAIResponses

MESSAGES = AnthropicMessages()
RESPONSES = OpenAIResponses()
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": OpenAIChat(),
    "/v1/completions": OpenAICompletions(),
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


def of_request(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect in which to answer a request: by its path, and elsewhere by whose SDK asks."""
    served = path.removesuffix("/count_tokens")
    found = next((dialect for end, dialect in DIALECTS.items() if served.endswith(end)), None)
    return found or (MESSAGES if "anthropic-version" in headers else DIALECTS["/v1/chat/completions"])

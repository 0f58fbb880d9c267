"""The APIs that the proxy speaks, by the path they are served at."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.proxy.dialects.anthropic.messages_dialect import AnthropicMessages
from agentrl.proxy.dialects.dialect import Dialect
from agentrl.proxy.dialects.openai.openai_chat import OpenAIChat
from agentrl.proxy.dialects.openai.openai_completions import OpenAICompletions
from agentrl.proxy.dialects.responses.responses_dialect import OpenAIResponses

MESSAGES = AnthropicMessages()
RESPONSES = OpenAIResponses()
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": OpenAIChat(),
    "/v1/completions": OpenAICompletions(),
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}

OF_ANTHROPICS_SDK = ("/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/models/{model}")
"""The paths that Anthropic's SDK requests. It adds a /v1 to a `base_url` that already ends in one, so these paths are
also served under /v1/v1: one `base_url` of a session works with every SDK."""


def of_request(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect of the answer to a request: by its path, or, for other paths, by the SDK that sends it."""
    served = path.removesuffix("/count_tokens")
    of_path = (dialect for end, dialect in DIALECTS.items() if served.endswith(end) or f"/v1{served}" == end)
    found = next(of_path, None)  # AReaL's paths have no /v1
    return found or (MESSAGES if "anthropic-version" in headers else DIALECTS["/v1/chat/completions"])

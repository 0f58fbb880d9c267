"""The messages and content blocks that a conversation in Anthropic's API may have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1)]


class Typed(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """An object with a `type`."""


class CacheControl(Typed, tag="ephemeral"):
    """Accepted without effect: the engine caches every prefix."""

    ttl: str | None = None


class _Cached(Typed):
    cache_control: CacheControl | None = None


class Text(_Cached, tag="text", kw_only=True):
    text: str
    citations: list[Any] | None = None  # the sources of another model's text; not part of the text
    parsed_output: Any = None  # added by the SDK's parser


class Thinking(Typed, tag="thinking"):
    thinking: str
    signature: str | None = None  # agentrl does not sign thinking


class RedactedThinking(Typed, tag="redacted_thinking"):
    data: str  # encrypted by another model's provider


class DirectCaller(Typed, tag="direct"):
    pass


class ToolUse(_Cached, tag="tool_use", kw_only=True):
    id: Name
    name: Name
    input: msgspec.Raw  # kept as written
    caller: DirectCaller | None = None
    toolset_name: str | None = None


class Image(_Cached, tag="image", kw_only=True):
    source: dict[str, Any]
    transformations: Any = None


class PlainText(Typed, tag="text", kw_only=True):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class Texts(Typed, tag="content", kw_only=True):
    content: str | list[Text]


class Pdf(Typed, tag="base64", kw_only=True):
    data: str
    media_type: str


class PdfAddress(Typed, tag="url", kw_only=True):
    url: str


class UploadedFile(Typed, tag="file", kw_only=True):
    file_id: str


class Document(_Cached, tag="document", kw_only=True):
    source: PlainText | Texts | Pdf | PdfAddress | UploadedFile
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None


class SearchResult(_Cached, tag="search_result", kw_only=True):
    content: list[Text]
    source: str
    title: str
    citations: dict[str, Any] | None = None


class ToolReference(_Cached, tag="tool_reference", kw_only=True):
    """In a tool's result: a deferred tool becomes callable."""

    tool_name: Name


class ToolResult(_Cached, tag="tool_result", kw_only=True):
    tool_use_id: Name
    content: str | list[Text | Image | Document | SearchResult | ToolReference] | None = None
    is_error: bool | None = None  # ignored: chat templates have no field for it
    toolset_name: str | None = None


class NamedTool(Typed, tag="tool_reference", kw_only=True):
    name: Name


class DefinedTool(Typed, tag="tool_definition", kw_only=True):
    definition: dict[str, Any]  # as an item of `tools`


class ToolAddition(_Cached, tag="tool_addition", kw_only=True):
    tool: NamedTool | DefinedTool


class ToolRemoval(_Cached, tag="tool_removal", kw_only=True):
    tool: NamedTool


class TurnConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None  # accepted without effect


class _Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="role"):
    pass


class UserMessage(_Message, tag="user"):
    content: str | list[Text | Document | SearchResult | ToolResult]


class AssistantMessage(_Message, tag="assistant"):
    content: str | list[Text | Thinking | RedactedThinking | ToolUse]


class SystemMessage(_Message, tag="system"):
    content: str | list[Text | ToolAddition | ToolRemoval] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnConfig | None = None


Message = UserMessage | AssistantMessage | SystemMessage

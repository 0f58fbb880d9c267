"""Input items of a Responses request, and their content parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1)]


class _Part(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    pass


class InputText(_Part, tag="input_text"):
    text: str


class InputImage(_Part, tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class InputFile(_Part, tag="input_file"):
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = None


class OutputText(_Part, tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # added by the SDK's parser


class Refusal(_Part, tag="refusal"):
    refusal: str


class ReasoningText(_Part, tag="reasoning_text"):
    text: str


class Direct(_Part, tag="direct"):
    """The model called the tool itself, not from a program."""


class _Item(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    id: str | None = None
    status: str | None = None


class Message(_Item, tag="message"):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[InputText | OutputText | Refusal]
    phase: str | None = None  # from models that mark their last text


class FunctionCall(_Item, tag="function_call"):
    call_id: Name
    name: Name
    arguments: str
    namespace: Name | None = None
    caller: Direct | None = None
    parsed_arguments: Any = None  # added by the SDK's parser


class FunctionCallOutput(_Item, tag="function_call_output"):
    call_id: Name
    output: str | list[InputText | InputImage | InputFile]
    name: str | None = None
    namespace: str | None = None
    caller: Direct | None = None


class Reasoning(_Item, tag="reasoning"):
    summary: list[Any] | None = None  # for display; not in the prompt
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


Item = Message | FunctionCall | FunctionCallOutput | Reasoning


ITEMS = "message, function_call, function_call_output, reasoning"

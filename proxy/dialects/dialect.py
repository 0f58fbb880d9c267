"""What every dialect shares: one request the proxy understands, one answer it gives, and how a dialect speaks them.

    body ──decode──► ModelRequest ──(sampled, committed)──► Answer ──encode──► body
                                   └── deltas as generated ──► StreamEncoder ──► server-sent events

Messages and tools of a `ModelRequest` are in Chat Completions' shape, whatever the dialect; so is an answer's message.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import orjson

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.neutral_fields import Neutral, Table
from agentrl.proxy.dialects.upstream_event import UpstreamEvent
from agentrl.rendering import Delta, ParsedOutput
from agentrl.rendering.encoding.text_decoding import reasoning_tokens

S = TypeVar("S", bound=msgspec.Struct)
NEAR = 0.85
"""How alike two parameters' names are before one is offered for the other: a typing error, not another word."""
SYNONYMS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_tokens_to_sample"),
    ("stop", "stop_sequences"),
    ("messages", "input", "prompt"),
    ("system", "instructions", "system_prompt"),
    ("response_format", "text", "output_format"),
    ("reasoning_effort", "reasoning", "thinking"),
)
"""Names that the APIs have for one thing: a caller who uses another API's is told this one's."""
UNSUPPORTED = "unsupported_parameter"
ENGINE_REFUSED = "the engine refused the request: "
_LOG_STAMP = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
TopLogprobs = list[list[tuple[float, int]]]  # for each token the likeliest (logprob, id), best first


@dataclass(frozen=True, slots=True)
class Named:
    """`tool_choice`: this tool and no other."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | Named


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """A decoded request. `sampling` and `constraint` hold only what the caller asked for, in SGLang's words."""

    model: str | None = None
    messages: list[Json] = field(default_factory=list)  # validated; empty beside `prompts`
    prompts: list[str | list[int]] = field(default_factory=list)  # raw ones: Completions
    previous_id: str | None = None  # the call whose conversation `messages` go on with: Responses
    has_instructions: bool = False  # the first message is of this call alone: what follows `previous_id` drops it
    tools: list[Json] | None = None
    loaded: list[Json] = field(default_factory=list)  # tools that messages define: callable, not in the list
    left_out: list[str] = field(default_factory=list)  # tools that a provider would run: the policy is not told of them
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    sampling: Json = field(default_factory=dict)  # temperature, top_p, top_k, penalties, logit_bias, …
    template_options: Json = field(default_factory=dict)  # chat_template_kwargs
    thinks: bool | None = None  # whether the policy is asked to think, by another parameter; None: not said
    constraint: Json = field(default_factory=dict)  # of the grammar: {"json_schema": "…"}
    seed: int | None = None
    max_tokens: int | None = None
    clips: bool = False  # of `max_tokens` as many as the context has room for are enough
    stop: list[str] = field(default_factory=list)
    n: int = 1  # answers to each prompt
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    kept: Json | None = None  # of the body, for who asks for the response once more: Responses
    wire: Any = None  # the dialect's own body: what its encoder needs besides
    size: int = 0  # bytes of its body

    @property
    def callable_tools(self) -> list[Json] | None:
        """What an answer may call."""
        return [*(self.tools or []), *self.loaded] or None

    @property
    def choices(self) -> int:
        """How many answers there will be."""
        return self.n * max(1, len(self.prompts))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseHeader:
    """What is known about a response when its first answer begins."""

    id: str  # of the first answer's interaction: 32 hex digits
    created: int  # seconds since the epoch
    model: str  # as the caller named it
    prompt_tokens: int
    max_context: int | None = None  # tokens, prompt and output together
    decode: Callable[[Sequence[int]], str]  # the text of some tokens, special ones included

    def token_text(self, token: int) -> str:
        """One token's text."""
        return self.decode([token])

    def reasoning_tokens(self, answer: Answer) -> int:
        """How many of an answer's tokens are reasoning."""
        return reasoning_tokens(answer.tokens.ids, answer.message.get("reasoning_content"), self.decode)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens, `ids` and `logprobs` of one length; `top` too, when it was asked for."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What one event of the engine made certain: parts of the message, and the tokens it brought."""

    deltas: list[Delta]
    tokens: Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished call, committed and ready to be encoded."""

    interaction_id: str
    message: Json  # role, content, reasoning_content, tool_calls
    finish_reason: str  # stop | length | tool_calls
    stop: str | None  # the stop string that ended it
    prompt_ids: Sequence[int]
    cached_tokens: int
    tokens: Tokens
    versions: list[list[int]]  # [weight version, start, end) over the output tokens


class StreamEncoder(Protocol):
    """One streamed response, in the dialect's event grammar. Every method returns bytes to send, perhaps none."""

    def start(self) -> bytes:
        """The events before the first delta."""
        ...

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """A part of an answer; tool calls come here too, after the commit."""
        ...

    def finish(self, choice: int, answer: Answer) -> bytes:
        """An answer is committed and all its deltas have been sent."""
        ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """All answers are committed; the last bytes."""
        ...

    def error(self, error: RequestError) -> bytes:
        """The response broke off; the last bytes."""
        ...


class Dialect(Protocol):
    """One API. `name` is recorded with every call; `body` is the shape of a request."""

    name: str
    body: type[msgspec.Struct]

    def decode(self, body: bytes) -> ModelRequest:
        """Read a request. Raises RequestError 400, naming what is wrong."""
        ...

    def encode(self, request: ModelRequest, header: ResponseHeader, answers: Sequence[Answer]) -> bytes:
        """The whole response; as many answers as the request has choices."""
        ...

    def stream(self, request: ModelRequest, header: ResponseHeader) -> StreamEncoder:
        """An encoder for the events of a streamed response."""
        ...

    def encode_error(self, error: RequestError) -> bytes:
        """The body of a response that is an error."""
        ...

    def read_upstream(self, data: Any) -> UpstreamEvent:
        """What the proxy acts on in another server's answer: `data` is a whole answer, or the payload of an event."""
        ...

    def status(self, error: RequestError) -> int:
        """The status that tells this API's clients of an error."""
        ...


def message_of(parsed: ParsedOutput) -> Json:
    """The assistant message as a client will send it back."""
    message: Json = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
    return message


def decode_struct(body: bytes, shape: type[S]) -> S:
    """A body as a struct that forbids unknown fields, save nulls. Raises RequestError 400 naming a bad field."""
    try:
        data = _read(body, shape)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), shape) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(body, error) from error
    try:  # what is read here is also written: to the store, to the engine, back to the caller
        orjson.dumps(data, default=_plain)
    except orjson.JSONEncodeError as error:
        raise _unwritable(data, error) from error
    return data


def translated(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error in a dialect's `names` of parameters, and an engine's words without what its log puts before them."""
    message, param = str(error), error.param
    if error.code == "engine_rejected":
        said = " ".join(_LOG_STAMP.sub("", message.replace(ENGINE_REFUSED, "")).split())
        message = ENGINE_REFUSED + said
        if " grammar" in said:
            param = "tools" if "structural_tag grammar" in said else "json_schema"
    if param is not None and error.code != UNSUPPORTED:  # which names what the caller wrote
        param = names.get(param, param)
    return RequestError(error.status, message, code=error.code, param=param, retry_after_s=error.retry_after_s)


def bad_parameter(param: str, message: str) -> RequestError:
    """A 400 for a value that cannot be, the status that OpenAI and Anthropic give it."""
    return RequestError(400, message, code="invalid_parameter", param=param)


def unsupported(param: str, message: str) -> RequestError:
    """A 400 for what agentrl does not do."""
    return RequestError(400, message, code=UNSUPPORTED, param=param)


def refuse(reasons: Mapping[str, str | bool]) -> None:
    """Raises RequestError 400 for the first parameter that has a reason to be refused."""
    for param, reason in reasons.items():
        if reason:
            raise unsupported(param, f"{param} is not supported: {reason}")


def check_neutral(param: str, value: Any, neutral: Neutral) -> None:
    """Raises RequestError 400 for a parameter with a value that would change something; null is absent."""
    if value is not None and not neutral.holds(value):
        raise unsupported(param, neutral.refusal(param))


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with a JSON payload."""
    line = b"data: " + orjson.dumps(data) + b"\n\n"
    return line if event is None else b"event: " + event.encode() + b"\n" + line


def _plain(value: msgspec.Struct | msgspec.Raw) -> Any:
    """A struct, or JSON that stays as it came, for orjson."""
    return orjson.Fragment(bytes(value)) if isinstance(value, msgspec.Raw) else msgspec.structs.asdict(value)


def _read(body: bytes, shape: type[S]) -> S:
    """A body; what it does not know is absent where it is null or neutral: some clients spell out all that there is.

    Raises RequestError 400 for a parameter of the shape's `NEUTRAL` that is not.
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError:
        known, table = shape.__struct_encode_fields__, neutral_of(shape)
        kept = {}
        for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
            if name in table and name not in known:
                check_neutral(name, msgspec.json.decode(raw), table[name])
            elif name in known or bytes(raw) != b"null":
                kept[name] = raw
        return msgspec.json.decode(msgspec.json.encode(kept), type=shape)


def invalid_at(message: str, at: str) -> RequestError:
    """msgspec's words on a part of a body, as an error that names its place `at` and what in it is bad."""
    what, _, where = message.partition(" - at `$")
    return _invalid(f"{what} - at `$.{at}{where.rstrip('`')}`", msgspec.Struct)


def neutral_of(shape: type[msgspec.Struct]) -> Table:
    """The parameters that a body may have besides its fields, with values that change nothing."""
    table: Table = getattr(shape, "NEUTRAL", {})
    return table


def _invalid(message: str, shape: type[msgspec.Struct]) -> RequestError:
    """msgspec's words (`Expected …, got … - at `$.field``) as an error that names the field."""
    what, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if what.startswith("Object contains unknown field"):
        name = what.split("`")[1]
        param = f"{path}.{name}" if path else name
        hint = "" if path else _near(name, shape)
        return unsupported(param, f"parameter {param!r} is not supported{hint}")
    if not path and "missing required field" in what:
        path = what.split("`")[1]
    if not path:
        return RequestError(400, f"the body is no valid request: {what}", code="invalid_json")
    return bad_parameter(path, f"{path}: {what[0].lower()}{what[1:]}")


def _near(name: str, shape: type[msgspec.Struct]) -> str:
    """`; did you mean …?` for what this API calls the same thing, or a name that this one is a typing error of."""
    known = [field for field in shape.__struct_encode_fields__ if field not in getattr(shape, "REFUSED", ())]
    same = next((names for names in SYNONYMS if name in names), ())
    near = [field for field in known if field in same] or (
        difflib.get_close_matches(name, known, n=1, cutoff=NEAR) if not same else []
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def _unreadable(body: bytes, error: Exception) -> RequestError:
    """Why a body cannot be read; half of a surrogate pair, which other parsers let through, with its place."""
    try:
        place = next((at for at, value in _values(json.loads(body)) if not _is_text(value)), None)
    except (ValueError, RecursionError):
        place = None
    if place is None:
        return RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json")
    message = f"{place}: half of a surrogate pair (\\ud800 to \\udfff alone) is no text"
    return RequestError(400, message, code="invalid_json", param=place)


def _unwritable(data: msgspec.Struct, error: Exception) -> RequestError:
    """Why what was read cannot be written; an integer that is too large, with its place."""
    for at, value in _values(data):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return RequestError(400, f"{at}: this integer has more than 64 bits", code="invalid_json", param=at)
    return RequestError(400, f"the body cannot be written again: {error}", code="invalid_json")


def _values(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and every value that holds no others, with its place."""
    stack = [("", value)]
    while stack:
        at, item = stack.pop()
        if isinstance(item, msgspec.Struct):
            item = msgspec.structs.asdict(item)
        if isinstance(item, dict):
            yield from ((at, name) for name in item)
            stack += [(f"{at}.{name}" if at else str(name), below) for name, below in item.items()]
        elif isinstance(item, list):
            stack += [(f"{at}[{i}]", below) for i, below in enumerate(item)]
        else:
            yield at, item


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

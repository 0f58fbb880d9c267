"""Model families that the `renderers` package writes by hand, behind our interface. Imported only when one is needed.

A family is used for a folder when its name is given, or when it reproduces the folder's own chat template on probes:
fine-tunes keep a family's architecture and change its template, so neither name nor architecture proves anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Undefined
from tokenizers import Tokenizer

from agentrl.errors import ModelFolderError, RequestError, did_you_mean
from agentrl.rendering.base import Bridge, Opening, OutputParser
from agentrl.rendering.family_parser import FamilyParser
from agentrl.rendering.folder import ModelFolder
from agentrl.rendering.jinja import for_template
from agentrl.rendering.markup import THINK
from agentrl.rendering.openings import derive_opening
from agentrl.rendering.text import TextParser
from agentrl.schemas import ForkReason, Json

_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_TALK: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 < 2?"},
    {"role": "assistant", "content": "True."},
    {"role": "user", "content": "Why?\n\nSay it in é words."},
]
_ARGUMENTS = '{"word": "é", "exact": true, "limits": {"low": 1.5, "tags": ["a", null]}}'
_TOOL_TALK: list[Json] = [
    *_TALK,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "A word.",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "look_up", "arguments": _ARGUMENTS}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "name": "look_up", "content": "a letter"},
]
PROBES: list[tuple[list[Json], list[Json] | None]] = [(_TALK, None), (_TALK[1:2], None), (_TOOL_TALK, [_TOOL])]


def load_family(folder: ModelFolder, name: str) -> FamilyRenderer:
    """The family called `name`, unproven. Raises ModelFolderError when it is unknown or does not fit the tokenizer."""
    if name not in family_names():
        choices = ["chatml", "template", *family_names()]
        raise ModelFolderError(f"unknown renderer {name!r}{did_you_mean(name, choices)}")
    found = _build(folder, name)
    if found is None:
        raise ModelFolderError(f"renderer {name!r} needs special tokens that {folder.path} does not have")
    return found


def find_family(folder: ModelFolder) -> FamilyRenderer | None:
    """The first family, likeliest first, that writes what the folder's chat template writes."""
    if folder.template is None:
        return None
    model_type = str(folder.config.get("model_type", "")).replace("_", "")
    for name in family_names():
        if model_type.startswith(_stem(name)):
            found = _build(folder, name)
            if found is not None and reproduces_template(found, folder):
                return found
    return None


def family_names() -> list[str]:
    """Every family, longer names first, so that `qwen3.5` is tried before `qwen3`."""
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return sorted(RENDERER_REGISTRY.keys() - {"default"}, key=lambda name: (-len(name), name))


def reproduces_template(renderer: FamilyRenderer, folder: ModelFolder) -> bool:
    """Whether both write the same ids for every probe. Templates that tell the date are asked without a clock."""
    assert folder.template is not None
    tokenizer = folder.tokenizer()
    no_clock = {"strftime_now": Undefined()}
    try:
        texts = [folder.template.render(messages, tools, options=no_clock) for messages, tools in PROBES]
    except RequestError:  # a template that refuses a probe
        return False
    ours = [renderer.render(messages, tools) for messages, tools in PROBES]
    return ours == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


class FamilyRenderer:
    """One hand-written family. Bridging and thinking retention follow the library."""

    def __init__(self, name: str, inner: Any, tokenizer: Tokenizer, folder: ModelFolder) -> None:
        """`inner` is the library's renderer over `tokenizer`."""
        self.name = name
        self.stop_token_ids: list[int] = inner.get_stop_token_ids()
        self.vocab_size = folder.vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_context = folder.max_context
        self._inner = inner
        self._tokenizer = tokenizer
        talk: list[Json] = [{"role": "user", "content": "x"}]
        self._generation_prompt = self.render(talk, None)[len(self._write_reply(talk, None)) :]
        thoughtful: Json = {"role": "assistant", "content": "x", "reasoning_content": "§"}
        written = self.decode(self._write_reply([*talk, thoughtful], None))
        self.reasons = "§" in written or self.decode(self._generation_prompt).rstrip().endswith(THINK)

    def render(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        """The prompt as the family writes it."""
        plain = [for_template(message) for message in messages]
        ids: list[int] = self._inner.render_ids(plain, tools=tools or None, add_generation_prompt=True)
        return ids

    def bridge(
        self,
        previous_ids: Sequence[int],
        messages_after: list[Json],
        tools: list[Json] | None,
        *,
        messages_before: list[Json] | None = None,
    ) -> Bridge:
        """The library's extension, checked to begin with `previous_ids`."""
        previous = list(previous_ids)
        if not previous or previous[-1] not in self.stop_token_ids:
            return Bridge(None, ForkReason.TRUNCATED)
        if any(message["role"] == "assistant" for message in messages_after):
            return Bridge(None, ForkReason.HISTORY_EDITED)  # a reply that no one sampled
        start = _last_index(previous, self._generation_prompt)
        plain = [for_template(message) for message in messages_after]
        extended = self._inner.bridge_to_next_turn(previous[:start], previous[start:], plain, tools=tools or None)
        if extended is None or extended.token_ids[: len(previous)] != previous:
            return Bridge(None, ForkReason.TEMPLATE_REWROTE)
        return Bridge(extended.token_ids[len(previous) :])

    def parser(self, tools: list[Json] | None, prompt_ids: Sequence[int]) -> OutputParser:
        """The library's parser, with reasoning and content streamed."""
        return FamilyParser(self._inner, self._tokenizer, self.stop_token_ids, tools, list(prompt_ids))

    def text_parser(self) -> OutputParser:
        """A parser that reads no markup."""
        return TextParser(self._tokenizer, self.stop_token_ids)

    def opening(self, tools: list[Json], name: str | None) -> Opening:
        """What the family writes before a call's name, or before its arguments."""
        return derive_opening(self, self._write_reply, self._encode, tools, name)

    def encode(self, text: str) -> list[int]:
        """A raw prompt, with what the tokenizer puts first."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _write_reply(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        ids: list[int] = self._inner.render_ids([for_template(message) for message in messages], tools=tools or None)
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class LibraryTokenizer:
    """A `tokenizers.Tokenizer` with the surface that `renderers` asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, folder: ModelFolder) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = str(folder.config.get("_name_or_path") or folder.path)
        self.unk_token_id = self._id(folder.special_tokens.get("unk_token"))
        self.eos_token_id = self._id(folder.special_tokens.get("eos_token"))
        self.chat_template = folder.template.source if folder.template else None

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Ids of a text; special tokens spelled in it count."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Ids with their character offsets."""
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of one id or several."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """Ids of tokens by name; the unknown token's where there is none."""
        if isinstance(tokens, str):
            found = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)


def _build(folder: ModelFolder, name: str) -> FamilyRenderer | None:
    from renderers import create_renderer
    from renderers.configs import config_from_name

    tokenizer = folder.tokenizer()
    try:
        inner = create_renderer(LibraryTokenizer(tokenizer, folder), config_from_name(name))
        return FamilyRenderer(name, inner, tokenizer, folder)
    except (AssertionError, ValueError, TypeError, LookupError):  # how families say that a token is missing
        return None


def _last_index(ids: list[int], part: list[int]) -> int:
    """Where the text behind the last occurrence of `part` starts; 0 without one."""
    if part:
        for start in range(len(ids) - len(part), -1, -1):
            if ids[start] == part[0] and ids[start : start + len(part)] == part:
                return start + len(part)
    return 0


def _stem(name: str) -> str:
    """How the model types of a family's models begin: `glm` for `glm-4.5`."""
    return name.partition("-")[0].rstrip("0123456789.")

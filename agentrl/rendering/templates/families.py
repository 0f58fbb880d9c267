"""Selects a model family of the `renderers` package for a model folder. Imported only when one is needed.

A family is used when it is named, or when it reproduces the folder's chat template on probes. Names and architectures
are not enough, since fine-tunes keep the architecture and change the template.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import Undefined
from tokenizers import Tokenizer

from agentrl.domain.schemas import Json
from agentrl.errors import ModelFolderError, RequestError, bad_parameter, did_you_mean
from agentrl.rendering.options import PARAM
from agentrl.rendering.parsing.parser_choice import FAMILIES
from agentrl.rendering.templates.family_renderer import FamilyRenderer, LibraryTokenizer
from agentrl.rendering.templates.model_folder import ModelFolder

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
OPTIONS = frozenset(
    (
        *("enable_thinking", "thinking", "reasoning_effort", "medium_effort", "low_effort", "date_string"),
        *("preserve_thinking", "preserved_thinking", "clear_thinking", "drop_thinking", "truncate_history_thinking"),
    )
)
"""The options of a family that a request may set."""
PROBES: list[tuple[list[Json], list[Json] | None]] = [(_TALK, None), (_TALK[1:2], None), (_TOOL_TALK, [_TOOL])]


def load_family(folder: ModelFolder, name: str, others: Iterable[str] = ()) -> FamilyRenderer:
    """The family `name`, without a probe. Raises ModelFolderError when it is unknown or does not fit the tokenizer.

    The error suggests similar names of families and of `others`.
    """
    if name not in family_names():
        choices = [*others, *family_names()]
        raise ModelFolderError(f"unknown renderer {name!r}{did_you_mean(name, choices)}")
    found = _build(folder, name, LibraryTokenizer(folder.tokenizer(), folder))
    if isinstance(found, str):
        raise ModelFolderError(f"renderer {name!r} {found}")
    return found


def find_family(folder: ModelFolder) -> FamilyRenderer | None:
    """The first family, most likely first, that reproduces the folder's chat template."""
    if folder.template is None:
        return None
    model_type = str(folder.config.get("model_type", "")).replace("_", "")
    names = [name for name in family_names() if model_type.startswith(_stem(name))]
    if not names:
        return None
    tokenizer = LibraryTokenizer(folder.tokenizer(), folder)  # a large vocabulary takes a second to load
    for name in names:
        found = _build(folder, name, tokenizer)
        if isinstance(found, FamilyRenderer) and reproduces_template(found, folder, tokenizer.wrapped):
            return found
    return None


def family_names() -> list[str]:
    """All families with a parser, longer names first, so that `qwen3.5` precedes `qwen3`."""
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return sorted(RENDERER_REGISTRY.keys() & FAMILIES.keys(), key=lambda name: (-len(name), name))


def reproduces_template(renderer: FamilyRenderer, folder: ModelFolder, tokenizer: Tokenizer) -> bool:
    """Whether family and template produce equal ids for every probe. Templates with a date get no clock."""
    assert folder.template is not None
    no_clock = {"strftime_now": Undefined()}
    try:
        texts = [folder.template.render(messages, tools, options=no_clock) for messages, tools in PROBES]
        ours = [renderer.render(messages, tools) for messages, tools in PROBES]
    except RequestError:  # unsupported probe
        return False
    return ours == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _build(folder: ModelFolder, name: str, tokenizer: LibraryTokenizer) -> FamilyRenderer | str:
    """The family over the folder's tokenizer, or the reason why it does not fit."""
    from renderers import create_renderer
    from renderers.configs import config_from_name

    config = config_from_name(name)
    assert config is not None
    kind = type(config)

    def make(options: Json) -> FamilyRenderer:
        try:
            configured = kind.model_validate(config.model_dump() | options)
        except ValueError as error:
            raise bad_parameter(PARAM, f"{PARAM}: the chat format {name!r} takes other values: {error}") from error
        keeping = configured.model_copy(update={"thinking_retention": "all"})
        inner = create_renderer(tokenizer, configured)
        return FamilyRenderer(name, inner, create_renderer(tokenizer, keeping), tokenizer.wrapped, folder, make, known)

    known = kind.model_fields.keys() & OPTIONS
    try:
        return make({})
    except (AssertionError, ValueError, TypeError, LookupError):  # the family's errors for missing tokens
        return f"needs special tokens that {folder.path} does not have"
    except RuntimeError as error:  # gpt-oss downloads its encoding at first use
        return f"cannot be loaded: {error}"


def _stem(name: str) -> str:
    """The prefix of a family's model types: `glm` for `glm-4.5`."""
    return name.partition("-")[0].rstrip("0123456789.")

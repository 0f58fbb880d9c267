"""The description of a renderer that keeps the contract."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from agentrl.domain.schemas import ForkReason
from agentrl.rendering import Renderer, load_renderer
from agentrl.rendering.templates.family_renderer import FamilyRenderer
from agentrl.rendering.templates.template_renderer import TemplateRenderer

from .. import family_models
from ..family_models import TOOLS
from ..subjects import QUESTION, template_sample

Json = dict[str, Any]


class Sample(Protocol):
    """Writes a reply as the format does: its ids, stop token included."""

    def __call__(self, message: Json, tools: list[Json] = ...) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Contracted:
    """A renderer, and what its format has room for."""

    renderer: Renderer
    sample: Sample
    folder: Path | None = None  # a model folder whose chat template the prompts equal
    one_call: bool = False  # a reply ends with its first call
    text_beside_calls: bool = True
    writes_call_ids: bool = False  # the model writes the ids of its calls
    call_ids: str = "abcdefgh{index}"  # as the format wants them
    reasoning: bool = True  # a reply may begin with reasoning
    forks: ForkReason | None = None  # why every turn forks
    keeps_stop: bool = True  # the stop token of a reply stands in later prompts
    joins_breaks: bool = True  # a reply's leading line break is one token with the break before it
    fragments: tuple[str, ...] = ()  # texts that look like markup of the format

    @property
    def tokenizer(self) -> Tokenizer:
        """The renderer's tokenizer."""
        found = self.renderer._tokenizer  # type: ignore[attr-defined]
        assert isinstance(found, Tokenizer)
        return found

    @property
    def special(self) -> list[str]:
        """The texts of the added tokens."""
        return [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]

    def encode(self, text: str) -> list[int]:
        """The ids of a text in which added tokens count, without a prefix."""
        return _encoders(self.renderer)[0].encode(text, add_special_tokens=False).ids

    def encode_as_text(self, text: str) -> list[int]:
        """The ids of a text in which no added token counts."""
        return _encoders(self.renderer)[1].encode(text, add_special_tokens=False).ids


@cache
def _encoders(renderer: Renderer) -> tuple[Tokenizer, Tokenizer]:
    spelled = renderer._tokenizer.to_str()  # type: ignore[attr-defined]
    bare = json.loads(spelled) | {"added_tokens": [], "post_processor": None}
    return Tokenizer.from_str(spelled), Tokenizer.from_str(json.dumps(bare))


def sampled_between(renderer: Renderer, message: Json, tools: list[Json] = TOOLS) -> list[int]:
    """The ids of a reply in a rendered conversation, from the generation prompt to the first stop token.

    For formats whose conversations are their turns, one after the other.
    """
    prompt = renderer.render(QUESTION, tools)
    whole = renderer.render([*QUESTION, message, *QUESTION], tools)
    assert whole[: len(prompt)] == prompt
    end = next(i for i, token in enumerate(whole) if i >= len(prompt) and token in renderer.stop_token_ids)
    return whole[len(prompt) : end + 1]


def described(folder: Path, name: str | None = None, **more: Any) -> Contracted:
    """The renderer of a model folder with a chat template; `more` are fields of `Contracted`."""
    renderer = load_renderer(folder, name)
    match renderer:
        case TemplateRenderer():
            sample: Sample = partial(template_sample, renderer)
        case FamilyRenderer():
            sample = partial(family_models.sample, renderer)
        case _:
            sample = partial(sampled_between, renderer)
    breaks = not isinstance(renderer, FamilyRenderer)  # which encodes the role and the text of a turn apart
    return Contracted(**{"renderer": renderer, "sample": sample, "folder": folder, "joins_breaks": breaks} | more)

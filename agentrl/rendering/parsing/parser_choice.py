"""Selects the output format and the parser of a family or a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from agentrl.domain.schemas import Json
from agentrl.rendering.parsing.alphabet import Alphabet, alphabet
from agentrl.rendering.parsing.markup import MarkupParser
from agentrl.rendering.parsing.output_formats import (
    DEEPSEEK,
    DSML,
    FORMATS,
    GEMMA,
    HERMES,
    HY3,
    KIMI,
    LLAMA,
    MINIMAX,
    PAIRS,
    XML,
    Format,
)
from agentrl.rendering.parsing.segments import HarmonyParser, InklingParser, SegmentParser
from agentrl.rendering.renderer import OutputParser

Reads = Format | type[SegmentParser]
"""How replies are parsed."""

TEMPLATES: Sequence[Reads] = (*FORMATS, HarmonyParser, InklingParser)
"""The formats of chat templates, in the order of attempts."""

FAMILIES: Mapping[str, Reads] = {
    **dict.fromkeys(("qwen3", "qwen3-vl"), HERMES),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), XML),
    **dict.fromkeys(("nemotron-3", "nemotron-3.5", "nemotron-3-ultra"), XML),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), PAIRS),
    **dict.fromkeys(("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"), PAIRS),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), KIMI),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), DEEPSEEK),
    "deepseek-v4": DSML,
    "gemma4": GEMMA,
    "gpt-oss": HarmonyParser,
    "hy3": HY3,
    "inkling": InklingParser,
    "llama-3": LLAMA,
    "minimax-m2": MINIMAX,
}
"""The format of each family of the `renderers` package. Missing families are not supported."""


def alphabet_of(reads: Reads, tokenizer: Tokenizer) -> Alphabet:
    """The alphabet of a format's markers."""
    if isinstance(reads, Format):
        return alphabet(tokenizer, (*reads.markers, *reads.atoms))
    return alphabet(tokenizer, (reads.opens, *reads.bodies, *reads.ends, *reads.others))


def output_parser(
    reads: Reads,
    tokenizer: Tokenizer,
    stop_token_ids: list[int],
    tools: list[Json] | None,
    prompt_ids: Sequence[int],
    *,
    thinks: bool = True,
    in_reasoning: bool = False,
    trims: bool = False,
) -> OutputParser:
    """A parser for one output of a prompt; the options are those of `MarkupParser`."""
    if isinstance(reads, Format):
        return MarkupParser(
            tokenizer, stop_token_ids, reads, tools, thinks=thinks, in_reasoning=in_reasoning, trims=trims
        )
    return reads(tokenizer, stop_token_ids, tools, prompt_ids)

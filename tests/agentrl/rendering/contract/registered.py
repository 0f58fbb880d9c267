"""The renderers that keep the contract: every format and family, and published templates of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentrl.domain.schemas import ForkReason

from ..chat_templates import HERMES, PLAIN, SEPARATED, TRIMMED
from ..conftest import CHATML_TOKENS, SMOLLM2_TEMPLATE, byte_tokenizer, published_template, write_folder
from ..family_models import FAMILIES
from ..qwen_vocabulary import qwen_tokenizer
from ..subjects import SUBJECTS, load_subject
from .contracted import Contracted, described

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
REPLY = "<think>\nhm\n</think>\n\nLet me see.\n"
REPLY += '<tool_call>\n{"name": "calc", "arguments": {"expression": "é"}}\n</tool_call>'
COMPACT = '<tool_call>\n{"name":"look_up","arguments":{"word":"\\u00e9","n":1}}\n</tool_call>'
HERMES_FRAGMENTS = ('{"name": "f", "arguments": {"a": 1}}', REPLY, COMPACT, "<think>\n\n</think>\n\n")
CALL_SYNTAX = ("calc(", ")", "calc(1) ", "  now() ", 'add({"a": 1, "b": 2})', "add({", "calc(12+35)x", "<|im_end|>")


def _subject(name: str, path: Path) -> Contracted:
    found = load_subject(path, name)
    folder = path if (path / "chat_template.jinja").exists() else None
    return Contracted(
        found.renderer,
        found.sample,
        folder,
        one_call=found.one_call,
        text_beside_calls=found.text_beside_calls,
        writes_call_ids="kimi-k2" in name or name in ("mistral (list)", "mistral (v11)"),
        call_ids=found.call_ids,
        reasoning="no thinking" not in name,
        keeps_stop="laguna" not in name,
        forks=ForkReason.REASONING_DROPPED if name == "deepseek-r1" else None,
    )


def _chatml(path: Path) -> Contracted:
    return _plain(write_folder(path, byte_tokenizer(*CHATML_TOKENS), SMOLLM2_TEMPLATE, max_position_embeddings=8192))


def _smollm2(_: Path) -> Contracted:
    folder = Path.home() / ".cache" / "agentrl" / "models" / "smollm2"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("SmolLM2 has not been built here")
    return _plain(folder)


def _plain(folder: Path) -> Contracted:
    found = described(folder, one_call=True, text_beside_calls=False, fragments=CALL_SYNTAX)
    assert found.renderer.name == "chatml"
    return found


def _template(source: str, path: Path, **more: Any) -> Contracted:
    tokenizer = byte_tokenizer(*CHATML_TOKENS, markers=MARKERS)
    return described(write_folder(path, tokenizer, source), "template", fragments=HERMES_FRAGMENTS, **more)


def _published(name: str, path: Path) -> Contracted:
    return _template(
        published_template(name), path, forks=ForkReason.TEMPLATE_REWROTE if name == "nemotron_3_nano" else None
    )


def _found(tokenizer: Tokenizer, template: str, model_type: str, path: Path) -> Contracted:
    folder = write_folder(path, tokenizer, published_template(template), model_type=model_type)
    return described(folder, fragments=HERMES_FRAGMENTS)


def _family(template: str, model_type: str, path: Path) -> Contracted:
    special = (*CHATML_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = byte_tokenizer(*special, markers=(*MARKERS, "<tool_response>", "</tool_response>"))
    return _found(tokenizer, template, model_type, path)


def _qwen(template: str, model_type: str, path: Path) -> Contracted:
    return _found(qwen_tokenizer(), template, model_type, path)


WRITTEN = {"plain": PLAIN, "separated": SEPARATED, "trimmed": TRIMMED, "hermes": HERMES}
PUBLISHED = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "nemotron_3_nano")

RENDERERS: dict[str, Callable[[Path], Contracted]] = {
    "chatml": _chatml,
    "chatml (SmolLM2)": _smollm2,
    **{f"{name} (synthetic)": partial(_subject, name) for name in SUBJECTS},
    **{f"template ({name})": partial(_template, source) for name, source in WRITTEN.items()},
    **{f"template ({name})": partial(_published, name) for name in PUBLISHED},
    "qwen3 (its template)": partial(_family, "qwen3", "qwen3"),
    "qwen3.6 (its template)": partial(_family, "qwen3_6", "qwen3_5"),
    "qwen3 (its vocabulary)": partial(_qwen, "qwen3", "qwen3"),
    "template (qwen3, its vocabulary)": partial(_qwen, "qwen3", "other"),
    "template (qwen2_5, its vocabulary)": partial(_qwen, "qwen2_5", "qwen2"),
}
"""By name: a function of an empty folder."""

TEMPLATED = [name for name in RENDERERS if name.removesuffix(" (synthetic)") not in FAMILIES]
"""Those whose model folder has a chat template."""
TEMPLATED_WITH_TOOLS = [name for name in TEMPLATED if not name.startswith("chatml")]
"""Those whose chat template writes tools and calls."""


def params(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: renderers with a real vocabulary of 150,000 tokens are slow to make, so they are long."""
    return [pytest.param(name, marks=pytest.mark.long) if "its vocabulary" in name else name for name in names]

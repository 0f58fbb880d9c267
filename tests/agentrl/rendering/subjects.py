"""What the adversarial cases are run on: every family, and every other output format behind a chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.rendering.parsing.output_formats import GEMMA, HY3, KIMI, MINIMAX, PAIRS, XML, Format
from agentrl.rendering.parsing.parser_choice import Reads
from agentrl.rendering.registry import load_renderer
from agentrl.rendering.templates.family_renderer import FamilyRenderer
from agentrl.rendering.templates.openings import behind_prompt
from agentrl.rendering.templates.template_renderer import TemplateRenderer

from . import family_models
from .conftest import byte_tokenizer, published_template, tool, write_folder
from .family_models import FAMILIES, NO_TEXT_BESIDE_CALLS, ONE_CALL, load_model, reply

TOOLS = [
    tool("calc", expression="string"),
    tool("look_up", word="string", n="integer", x="number", b="boolean", l="array", o="object", z="null"),
]
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A renderer and the ids of replies as its own format writes them."""

    name: str
    renderer: FamilyRenderer | TemplateRenderer
    reads: Reads
    one_call: bool
    text_beside_calls: bool
    sample: Callable[..., list[int]]
    prompt: list[int]  # with tools

    @property
    def untyped(self) -> bool:
        """Whether values stand without quotes, so that any word is a value."""
        return self.reads in (XML, PAIRS, HY3, MINIMAX, GEMMA)

    @property
    def opener(self) -> str:
        """The marker before a call, "" where there is none."""
        return next(iter(self.reads.blocks)) if isinstance(self.reads, Format) and not self.reads.bare else ""

    @property
    def closer(self) -> str:
        """What a call cannot be without."""
        if not isinstance(self.reads, Format):
            return "<|end_message|>" if self.reads.name == "inkling" else "}"
        end = self.reads.blocks.get(self.opener)
        return end or "}"

    @property
    def markers(self) -> list[str]:
        """The single tokens of the vocabulary that are markers of calls and reasoning."""
        tokens = self.renderer._tokenizer.get_added_tokens_decoder()
        stops = self.renderer.stop_token_ids
        return [token.content for id, token in tokens.items() if id not in stops and '"' not in token.content]

    def write(self, *calls: Call, text: str = "") -> list[int]:
        """The ids of a reply, its stop token included."""
        ids = (self.call_ids.format(name=name, index=i) for i, (name, _) in enumerate(calls))
        return self.sample(reply(text, "", *((id, *call) for id, call in zip(ids, calls, strict=True))))

    def ends(self, ids: list[int]) -> bool:
        """Whether the last id stops the reply."""
        return bool(ids) and ids[-1] in self.renderer.stop_token_ids

    @property
    def call_ids(self) -> str:
        """The format of call ids."""
        return "functions.{name}:{index}" if self.reads is KIMI or "kimi" in self.name else "abcdefgh{index}"


TALK = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|turn|>assistant
{{ m.content }}CALLS<|end|>
{% else %}<|turn|>{{ m.role }}
{{ m.content }}<|end|>
{% endif %}{%- endfor -%}
{%- if tools %}{{ '' }}{% endif -%}
{%- if add_generation_prompt %}<|turn|>assistant
{% endif %}"""
"""Turns of some chat format, whose calls are one of those below. Tools are told to the model before anything else."""

_EACH = "{%- for call in m.tool_calls or [] %}{% set f = call.function %}"
_CODER = (
    "{{ '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
    "{% for k, v in f.arguments.items() %}{{ '<parameter=' + k + '>\\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
)
_DSML = """<｜DSML｜invoke name="{{ f.name }}">
{% for k, v in f.arguments.items() -%}
<｜DSML｜parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">
{{- v if v is string else v | tojson -}}
</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
"""
_K3 = (
    '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>{% for k, v in f.arguments.items() %}'
    """<|open|>argument key="{{ k }}" type="{{ 'string' if v is string else 'any' }}"<|sep|>"""
    "{{ v if v is string else v | tojson }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>"
)


def _calls(each: str, before: str = "", after: str = "") -> str:
    inner = f"{_EACH}{each}{{% endfor %}}"
    return f"{{% if m.tool_calls %}}{before}{inner}{after}{{% endif %}}"


WRITTEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3-coder": (_calls(_CODER), ("<tool_call>", "</tool_call>")),
    "mistral (list)": (
        "{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
        '"id": "{{ call.id }}"}'
        "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
        ("[TOOL_CALLS]",),
    ),
    "mistral (v11)": (
        _calls("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}"),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "mistral (v13)": (
        _calls("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    ),
    "llama-4": (
        "{% if m.tool_calls %}<|python_start|>[{% for call in m.tool_calls %}{% set f = call.function %}{{ f.name }}("
        "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
        "){{ ', ' if not loop.last }}{% endfor %}]<|python_end|>{% endif %}",
        ("<|python_start|>", "<|python_end|>"),
    ),
    "deepseek-v3.1": (
        _calls(
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
        tuple(
            f"<｜{name}｜>"
            for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
        ),
    ),
    "deepseek-v3.2": (
        _calls(_DSML, "\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        ("｜DSML｜",),
    ),
    "kimi-k3": (_calls(_K3, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"), ("<|open|>", "<|close|>", "<|sep|>")),
}
"""Formats without a family: how they write calls, as SGLang's parsers of them read them, and their tokens."""

PUBLISHED = {
    "qwen2.5": ("qwen2_5", ("<tool_call>", "</tool_call>"), "<|im_end|>"),
    "qwen3.5 (no thinking)": ("qwen3_5_nothink", ("<tool_call>", "</tool_call>", "<think>", "</think>"), "<|im_end|>"),
    "llama-3.1": ("llama3_1", ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"), "<|eot_id|>"),
    "lfm2": ("lfm2_v2", ("<|tool_call_start|>", "<|tool_call_end|>"), "<|im_end|>"),
}
"""Published chat templates that no family writes."""

SUBJECTS = [*FAMILIES, *WRITTEN, *PUBLISHED]


def load_subject(path: Path, name: str) -> Subject:
    """A subject over a tokenizer of its own."""
    if name in FAMILIES:
        family = load_model(path, name)
        return Subject(
            name,
            family,
            family._reads,
            name in ONE_CALL,
            name not in NO_TEXT_BESIDE_CALLS,
            partial(family_models.sample, family),
            family.render(QUESTION, TOOLS),
        )
    if name in WRITTEN:
        calls, tokens = WRITTEN[name]
        template, end = "{% if tools %}<|turn|>tools\n<|end|>\n{% endif %}" + TALK.replace("CALLS", calls), "<|end|>"
        special = ("<|turn|>", end)
    else:
        published, tokens, end = PUBLISHED[name]
        template, special = published_template(published), ("<|im_start|>", end)
    folder = write_folder(path, byte_tokenizer(*special, markers=tokens), template)
    config = (folder / "tokenizer_config.json").read_text().replace("<|im_end|>", end)
    (folder / "tokenizer_config.json").write_text(config)
    renderer = load_renderer(folder)
    assert isinstance(renderer, TemplateRenderer), renderer
    return Subject(
        name,
        renderer,
        renderer._reads,
        "llama-3" in name,
        "llama" not in name,
        partial(template_sample, renderer),
        renderer.render(QUESTION, TOOLS),
    )


def template_sample(
    renderer: TemplateRenderer, message: dict[str, Any], tools: list[dict[str, Any]] = TOOLS
) -> list[int]:
    """The ids of a reply as the template writes it behind its generation prompt, up to the token that stops it."""
    prompt = renderer.render(QUESTION, tools)
    ids = behind_prompt(renderer, renderer._write_reply, renderer._encode, prompt, message, tools)
    assert ids is not None
    end = next(i for i, token in enumerate(ids) if token in renderer.stop_token_ids)
    return ids[: end + 1]

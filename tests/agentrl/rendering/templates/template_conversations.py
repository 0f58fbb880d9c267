"""Conversations with a renderer over a given chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.domain.schemas import ForkReason
from agentrl.rendering import Renderer, load_renderer
from agentrl.rendering.templates.template_renderer import TemplateRenderer

from ..conftest import CHATML_TOKENS, byte_tokenizer, call, tool, write_folder

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CALC = tool("calc", expression="string")
HISTORY: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def load(tmp_path: Path, template: str) -> TemplateRenderer:
    folder = write_folder(tmp_path / "model", byte_tokenizer(*CHATML_TOKENS, markers=MARKERS), template)
    renderer = load_renderer(folder, "template")
    assert isinstance(renderer, TemplateRenderer)
    return renderer


def sample(renderer: Renderer, text: str) -> list[int]:
    """The ids of a reply, its end included."""
    return byte_tokenizer(*CHATML_TOKENS, markers=MARKERS).encode(text + "<|im_end|>", add_special_tokens=False).ids


def parse(renderer: Renderer, prompt: list[int], sampled: list[int]) -> Any:
    parser = renderer.parser([CALC], prompt)
    parser.push(sampled)
    return parser.finish()


def talk(renderer: TemplateRenderer, turns: list[tuple[str, str]]) -> list[ForkReason | None]:
    """Why each turn forked; None where it was bridged, and then to what follows the sampled reply in the template."""
    messages, reasons = list(HISTORY), []
    ids = renderer.render(messages, [CALC])
    for sampled, question in turns:
        output = sample(renderer, sampled)
        parser = renderer.parser([CALC], ids)
        parser.push(output)
        parsed = parser.finish()
        reply: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.tool_calls:
            reply["tool_calls"] = [call(item.name, item.arguments, item.id) for item in parsed.tool_calls]
        after: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": item.id, "content": question} for item in parsed.tool_calls
        ] or [{"role": "user", "content": question}]
        before = [*messages, reply]
        messages = [*before, *after]
        bridge = renderer.bridge(ids + output, after, [CALC], messages_before=before)
        rendered = renderer.encode(renderer._text(messages, [CALC]))  # `render` would also remember it
        if bridge.delta_ids is not None:
            assert renderer.decode(rendered).endswith(renderer.decode(bridge.delta_ids))
            ids = ids + output + bridge.delta_ids
        else:
            ids = rendered
        reasons.append(bridge.reason)
    return reasons


YES, AND = {"role": "assistant", "content": "yes"}, [{"role": "user", "content": "and?"}]

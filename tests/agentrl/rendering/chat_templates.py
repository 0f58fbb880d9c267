"""Small chat templates: some keep what they have written when messages follow, some rewrite it."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.rendering import Renderer

PLAIN = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if tools %}{{ '' }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Stable: what it has written stays when messages follow."""

FORGETFUL = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.last %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops reasoning as soon as something follows."""

COUNTING = "{{ messages | length }}" + PLAIN
"""Rewrites its first token with every message."""

DATED = "<|im_start|>system\nIt is {{ strftime_now('%H:%M:%S.%f') }}.<|im_end|>\n" + PLAIN
"""Tells the time."""

NUMBERED = PLAIN.replace("{{ message.role }}", "{{ message.role }} {{ messages | length - loop.index }}")
"""Numbers every turn from the end."""

BREAK = "{{ '\n\n' }}"
SEPARATED = PLAIN.replace(
    "<|im_end|>\n{% endfor %}", f"<|im_end|>{{% if not loop.last %}}{BREAK}{{% endif %}}{{% endfor %}}"
)
SEPARATED = SEPARATED.replace("{%- if add_generation_prompt %}", "{%- if add_generation_prompt %}" + BREAK)
"""Writes line breaks between turns and none behind the last one."""

TRIMMED = PLAIN.replace("{{ message.content }}", "{{ message.content | trim }}")
"""Cuts white space off every message."""

PADDED = PLAIN.replace(
    "<|im_end|>\n{% endfor", "{{ '.' if loop.last and message.role == 'assistant' }}<|im_end|>\n{% endfor"
)
"""Writes a full stop at the end of a reply that is the last message."""

LOUD = PLAIN.replace("{{ message.content }}", "{{ message.content | upper }}")
"""Writes every message in capitals."""

THOUGHTFUL = "{{ tools | tojson if tools }}" + PLAIN.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)
"""Begins with the tools, and keeps reasoning."""

QUOTING = THOUGHTFUL.replace(
    "\n{% if message", "\n{{ '> ' if tools and message.role == 'assistant' }}{% if message"
).replace("assistant\n{% endif %}", "assistant\n{{ '> ' if tools }}{% endif %}")
"""Begins with the tools, and every reply with a mark where there are tools."""

OPENED = THOUGHTFUL.replace("message.reasoning_content %}", "message.reasoning_content and loop.last %}").replace(
    "assistant\n{% endif %}", "assistant\n{% if tools %}<think>{% endif %}{% endif %}"
)
"""Begins with the tools, opens reasoning where there are tools, and drops it as soon as something follows."""

ELIDING = PLAIN.replace(
    "{{ message.content }}", "{{ 'said' if message.role == 'assistant' and loop.revindex > 3 else message.content }}"
)
"""Shortens a reply once three messages follow."""

HERMES = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Writes calls as Hermes and Qwen do."""


def check_prompt(
    renderer: Renderer,
    folder: Path,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    text_only: bool = False,
) -> None:
    """The prompt equals what transformers renders by the folder's chat template, as ids and as text."""
    theirs = _transformers_tokenizer(folder, renderer.name in ("chatml", "template"))
    values: list[dict[str, Any]] = deepcopy(messages)
    for item in (item for message in values for item in message.get("tool_calls", [])):
        item["function"]["arguments"] = json.loads(item["function"]["arguments"])
    ids = renderer.render(messages, tools)
    expected = theirs.apply_chat_template(values, tools=tools, add_generation_prompt=True, return_dict=False)
    assert text_only or ids == list(expected)
    text = theirs.apply_chat_template(values, tools=tools, add_generation_prompt=True, tokenize=False)
    assert renderer.decode(ids) == text


@cache
def _transformers_tokenizer(folder: Path, auto: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # By the model type of a family, AutoTokenizer replaces the pre-tokenizer of tokenizer.json.
    return (AutoTokenizer if auto else PreTrainedTokenizerFast).from_pretrained(folder)

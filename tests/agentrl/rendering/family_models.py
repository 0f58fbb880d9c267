"""Synthetic models of every family: a byte-level tokenizer with the special tokens that the family asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from agentrl.rendering import load_renderer
from agentrl.rendering.templates.families import family_names
from agentrl.rendering.templates.family_renderer import FamilyRenderer
from agentrl.rendering.templates.openings import behind_prompt

from .conftest import byte_tokenizer, call, tool, write_folder

FAMILIES = sorted(family_names())

CALC = tool("calc", expression="string")
LOOK_UP = tool("look_up", word="string", n="integer")
TOOLS = [CALC, LOOK_UP]

ONE_CALL = {"llama-3", "gpt-oss"}
"""A turn of theirs ends with its first call."""

NO_TEXT_BESIDE_CALLS = {"llama-3", "gemma4"}
"""Their turns are text or calls; gemma4 writes the text of a turn with calls behind the results."""


class _Asked:
    """A tokenizer that has every token it is asked for, and remembers them."""

    name_or_path, chat_template, unk_token_id, eos_token_id = "asked", None, None, None

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def convert_tokens_to_ids(self, token: str) -> int:
        if token not in self.tokens:
            self.tokens.append(token)
        return 256 + self.tokens.index(token)

    def encode(self, text: str, **_: Any) -> list[int]:
        if re.fullmatch(r"<?[|｜][^|｜]+[|｜]>?|</?think>", text):
            return [self.convert_tokens_to_ids(text)]
        return list(text.encode())

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(self.tokens[id - 256] for id in ([ids] if isinstance(ids, int) else ids))


def special_tokens(name: str) -> list[str]:
    """The tokens without which the family cannot be built."""
    from renderers import create_renderer
    from renderers.configs import config_from_name

    asked = _Asked()
    create_renderer(asked, config_from_name(name))
    if "</think>" in asked.tokens:  # models have both, families may ask for one
        asked.convert_tokens_to_ids("<think>")
    return asked.tokens


class Harmony:
    """What gpt-oss asks of the `openai-harmony` encoder, whose vocabulary is downloaded: its messages as documented,
    over the synthetic tokenizer. It stands in for the encoder alone; the family's own code is the library's."""

    def __init__(self) -> None:
        self.tokenizer: Tokenizer | None = None

    def render(self, message: Any) -> list[int]:
        """`<|start|>author to=… <|channel|>…<|message|>text<|end|>`."""
        assert self.tokenizer is not None
        role = str(message.author.role.value)
        header = message.author.name or role
        header += f" to={message.recipient}" if message.recipient else ""
        header += f"<|channel|>{message.channel}" if message.channel else ""
        calls = role == "assistant" and message.recipient
        text = "".join(getattr(part, "text", None) or str(part.to_dict()) for part in message.content)
        return self.tokenizer.encode(
            f"<|start|>{header}<|message|>{text}{'<|call|>' if calls else '<|end|>'}", add_special_tokens=False
        ).ids

    def render_conversation(self, conversation: Any) -> list[int]:
        """All messages, one after the other."""
        return [token for message in conversation.messages for token in self.render(message)]


@contextmanager
def harmony(encoder: Harmony) -> Iterator[None]:
    """gpt-oss finds `encoder` where it would download its vocabulary."""
    with patch("renderers.gpt_oss.load_harmony_encoding", lambda name: encoder):
        yield


def load_model(path: Path, name: str) -> FamilyRenderer:
    """The family over a tokenizer of its own."""
    encoder = Harmony()
    with harmony(encoder):
        tokenizer = byte_tokenizer(*special_tokens(name))
        encoder.tokenizer = tokenizer
        renderer = load_renderer(write_folder(path, tokenizer, None), name)
    assert isinstance(renderer, FamilyRenderer)
    return renderer


def reply(content: str, reasoning: str = "", *calls: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """An assistant's message; calls are (id, name, arguments)."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call(name, json.dumps(arguments), id) for id, name, arguments in calls]
    return message


def sample(renderer: FamilyRenderer, message: dict[str, Any], tools: list[dict[str, Any]] = TOOLS) -> list[int]:
    """The ids of a reply as the family writes it behind its generation prompt, up to the token that stops it."""
    question: dict[str, Any] = {"role": "user", "content": "x"}
    prompt = renderer.render([question], tools)
    reasoning = message.get("reasoning_content", "")
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}

    def written(message: dict[str, Any]) -> list[int] | None:
        return behind_prompt(renderer, renderer._write, renderer._encode, prompt, message, tools)

    ids = written(message) if reasoning and not renderer._opens_reasoning else None
    if ids is None:  # the format leaves reasoning to the model: it goes where the prompt has opened it
        ids = written(bare)
        if ids is None:  # gpt-oss leaves out the reasoning of an answer, and its prompts have opened one
            final = "<|end|><|start|>assistant<|channel|>final<|message|>"
            ids = renderer._encode(f"{final}{message['content']}<|return|>")
        if reasoning and (renderer._opens_reasoning or renderer.name == "gpt-oss"):
            ids = [*renderer._encode(reasoning), *ids]
    for i, token in enumerate(ids):
        if token in renderer.stop_token_ids:
            return ids[: i + 1]
    return [*ids, _stop(renderer, message)]


def _stop(renderer: FamilyRenderer, message: dict[str, Any]) -> int:
    """Families whose turns end where the next one begins stop with the role that they expect."""
    expected = renderer.encode("<|observation|>" if message.get("tool_calls") else "<|user|>")
    return expected[0] if expected[0] in renderer.stop_token_ids else renderer.stop_token_ids[0]

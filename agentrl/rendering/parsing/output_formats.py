"""The output formats: how models write reasoning and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from agentrl.rendering.parsing.call_readers import (
    DeepSeekReader,
    DsmlReader,
    HermesReader,
    InvokeReader,
    KimiK3Reader,
    KimiReader,
    PairsReader,
    Reader,
    XmlReader,
)
from agentrl.rendering.parsing.list_readers import GemmaReader, Llama4Reader, LlamaReader, MistralReader, PythonReader
from agentrl.rendering.renderer import new_call_id

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Format:
    """How a model writes its replies. Markers listed in `atoms` are also single tokens."""

    name: str
    reader: Reader
    blocks: Mapping[str, str | None]
    """The markers around a call; without a closing marker the call extends to the end of the reply."""
    think: tuple[str, str] = (THINK, END_THINK)
    section: tuple[str, str] | None = None
    """The markers around all calls of a reply."""
    needs_section: bool = False
    """Whether a call outside of a section is text."""
    dropped: tuple[str, ...] = ()
    """Markers around content, which are removed."""
    bare: str = ""
    """The start of a call without markers."""
    atoms: tuple[str, ...] = ()
    """Tokens that markers and calls are made of."""
    ends_reasoning: bool = True
    """Whether a call closes reasoning that is still open when the reply ends."""
    new_id: Callable[[], str] = field(default=new_call_id)
    reasoning_key: str = "reasoning_content"
    """The message field in which templates expect reasoning."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        ends = [end for end in self.blocks.values() if end is not None]
        return (*self.think, *self.blocks, *ends, *(self.section or ()), *self.dropped)


def short_id() -> str:
    """A random id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_HY3 = ":opensource"
_SEP = "<|sep|>"

HERMES = Format(name="hermes", reader=HermesReader, blocks={CALL: END_CALL})
XML = Format(name="xml", reader=XmlReader, blocks={CALL: END_CALL})
PAIRS = Format(
    name="pairs",
    reader=PairsReader,
    blocks={CALL: END_CALL},
    atoms=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
HY3 = Format(
    name="hy3",
    reader=partial(PairsReader, suffix=_HY3),
    think=(f"<think{_HY3}>", f"</think{_HY3}>"),
    blocks={f"<tool_call{_HY3}>": f"</tool_call{_HY3}>"},
    section=(f"<tool_calls{_HY3}>", f"</tool_calls{_HY3}>"),
    atoms=tuple(f"<{tag}{_HY3}>" for tag in ("tool_sep", "arg_key", "/arg_key", "arg_value", "/arg_value")),
    ends_reasoning=False,
)
KIMI = Format(
    name="kimi",
    reader=KimiReader,
    blocks={"<|tool_call_begin|>": "<|tool_call_end|>"},
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    atoms=("<|tool_call_argument_begin|>",),
)
DEEPSEEK = Format(
    name="deepseek",
    reader=DeepSeekReader,
    blocks={"<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>"},
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    atoms=("<｜tool▁sep｜>",),
    ends_reasoning=False,
)
MINIMAX = Format(
    name="minimax",
    reader=InvokeReader,
    blocks={'<invoke name="': "</invoke>"},
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    needs_section=True,
)
DSML = Format(
    name="dsml",
    reader=DsmlReader,
    blocks={'<｜DSML｜invoke name="': "</｜DSML｜invoke>"},
    section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    needs_section=True,
    atoms=("｜DSML｜",),
    ends_reasoning=False,
)
DSML_V3 = Format(
    name="dsml-v3.2",
    reader=DsmlReader,
    blocks=DSML.blocks,
    section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    needs_section=True,
    atoms=DSML.atoms,
    ends_reasoning=False,
)
GEMMA = Format(
    name="gemma4",
    reader=GemmaReader,
    think=("<|channel>thought\n", "<channel|>"),
    blocks={"<|tool_call>": "<tool_call|>"},
    atoms=(GemmaReader.QUOTE, "<|channel>"),
)
KIMI_K3 = Format(
    name="kimi-k3",
    reader=KimiK3Reader,
    think=(f"<|open|>think{_SEP}", f"<|close|>think{_SEP}"),
    blocks={"<|open|>call": f"<|close|>call{_SEP}"},
    section=(f"<|open|>tools{_SEP}", f"<|close|>tools{_SEP}"),
    needs_section=True,
    dropped=(f"<|open|>response{_SEP}", f"<|close|>response{_SEP}", f"<|close|>message{_SEP}"),
    atoms=("<|open|>", "<|close|>", _SEP),
    ends_reasoning=False,
)
LLAMA = Format(name="llama", reader=LlamaReader, blocks={"<|python_tag|>": None}, bare="{")
LLAMA4 = Format(
    name="llama4", reader=Llama4Reader, blocks={"<|python_start|>": "<|python_end|>", "<|python_tag|>": None}, bare="{["
)
MISTRAL = Format(
    name="mistral",
    reader=MistralReader,
    think=("[THINK]", "[/THINK]"),
    blocks={"[TOOL_CALLS]": None},
    atoms=("[ARGS]", "[CALL_ID]"),
    new_id=short_id,
)
LFM = Format(name="lfm", reader=PythonReader, blocks={"<|tool_call_start|>": "<|tool_call_end|>"})

FORMATS = (HERMES, XML, PAIRS, KIMI, DEEPSEEK, MINIMAX, DSML, DSML_V3, GEMMA, KIMI_K3, MISTRAL, LFM, LLAMA, LLAMA4)
"""The formats of chat templates, in the order of attempts."""

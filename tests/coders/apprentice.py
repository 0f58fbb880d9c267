"""A model that does one small job with any coding agent's shell tool, and the script of what it says.

The job takes two tool calls and an answer in words. What is said next depends on the last turn alone: on what a tool
answered, or on there being no such answer yet (`next_line`). A scripted engine follows the script; a model with a real
vocabulary and a long context can learn it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl.domain.schemas import Json
from agentrl.models import resolve_model, tiny
from agentrl.rendering import load_renderer

CONTEXT_LENGTH = 65_536
VOCABULARY = 4096
SECRET = "heliotrope"
JOB = "Which word is in note.txt? Write it into answer.txt with the shell, then tell me."
COMMANDS = ("cat note.txt", f"echo {SECRET} > answer.txt && echo written")
OF_MINI, HAND_IN = '"returncode": 0', "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What results of mini-swe-agent's shell hold, and the command that ends its work: it takes no answer in words."""
ANSWER = f"The word is {SECRET}."
SHELLS: dict[str, tuple[str | None, Json]] = {
    "Bash": ("command", {}),
    "exec_command": ("cmd", {}),
    "bash": (None, {}),
}
"""Shell tools by name: what they call the command (a tool with one parameter has no name for it in call syntax), and
what they take before it."""


def write_folder(out: Path) -> None:
    """Tokenizer, chat template and configuration of the model, without weights: the tiny model's, but for the size."""
    make_tokenizer().save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(tiny.tokenizer_config() | {"model_max_length": CONTEXT_LENGTH})
    )
    (out / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE)
    config = tiny.model_config().to_dict() | {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT_LENGTH}
    (out / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}))


def make_tokenizer() -> Tokenizer:
    """The likeliest words of SmolLM2's vocabulary: a coding agent's prompt has some thousand tokens of them."""
    known = json.loads((resolve_model("smollm2") / "tokenizer.json").read_text())["model"]
    words = [*tiny.SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = []
    for left, right in known["merges"][: VOCABULARY - len(words)]:
        merges.append((left, right))
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tiny.SPECIAL_TOKENS])
    return tokenizer


class Script:
    """Answers as token ids, for `FakeEngine`."""

    def __init__(self, folder: Path) -> None:
        self._renderer = load_renderer(folder)
        self.next_line = next_line  # another test may have another job

    def respond(self, input_ids: list[int], sampling_params: Json) -> list[int]:
        """What the apprentice says to a prompt."""
        said = self.next_line(self._renderer.decode(input_ids))
        return self._renderer.encode(said) + self._renderer.stop_token_ids[:1]


def next_line(prompt: str) -> str:
    """The next answer, by the prompt's last turn; a call is in call syntax, for the first shell tool of the prompt."""
    role, said = last_turn(prompt)
    if role != "tool":
        return shell_call(prompt, COMMANDS[0])
    if SECRET in said:
        return shell_call(prompt, COMMANDS[1])
    if OF_MINI in said:
        return shell_call(prompt, HAND_IN)
    return ANSWER


def last_turn(prompt: str) -> tuple[str, str]:
    """Who spoke last, and what."""
    role, _, said = prompt.split("<|im_start|>")[-2].partition("\n")
    return role, said


def shell_call(prompt: str, command: str) -> str:
    """A call of the prompt's shell tool."""
    tools = prompt.partition("\nTools: ")[2]
    name = next(name for name in SHELLS if f"{name}(" in tools)
    parameter, before = SHELLS[name]
    return f"{name}({command})" if parameter is None else call(name, **before | {parameter: command})


def call(tool: str, **arguments: Any) -> str:
    """A call in call syntax."""
    return f"{tool}({json.dumps(arguments)})"

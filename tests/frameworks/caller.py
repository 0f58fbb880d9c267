"""A model that always calls its tool: the tiny Qwen2's shape, taught one conversation in some seconds.

The official SDKs and frameworks need a model that answers with a tool call, and then with text, whatever stands in
front of the conversation. This one has learned by heart what follows each of eight turns (`SKILLS`); it looks at the
last turn only, so every framework's own system prompt, tools and history go before it unseen.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import teaching

from agentrl.models import tiny

FIRST, SECOND = "What is 12 plus 35?", "And twice that?"
SKILLS = [  # who speaks, what the turn ends with, what the model says then
    ("user", FIRST, "calc(12+35)"),
    ("tool", "47", "Answer: 47"),
    ("user", SECOND, "calc(47*2)"),
    ("tool", "94", "Answer: 94"),
    ("user", "Observation:\n47", "final_answer(47)"),  # how smolagents shows results
    ("user", "Observation:\n94", "final_answer(94)"),
    ("user", "12+35", "47"),  # what a sub-agent behind the tool is asked
    ("user", "47*2", "94"),
]
LONGEST_FILLER = 80
BATCH = 8
LEARNING_RATE = 4e-3
STEPS = 120
SKILLS_AT_ONCE = 5
SHARPNESS = 1.5  # logits are multiplied by it: a sample at temperature 1 is seldom another token than the best


def build(out: Path) -> None:
    """Train the model and write config, weights and tokenizer into the existing folder `out`."""
    import torch
    from transformers import Qwen2ForCausalLM

    tokenizer = tiny.make_tokenizer()
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two wait for each other where the machine does anything else
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(tiny.model_config())
        rng = random.Random(0)

        def loss_of(_: int) -> torch.Tensor:
            ids, labels = batch(tokenizer, rng)
            return model(input_ids=ids, labels=labels).loss

        teaching.teach(model, loss_of, steps=STEPS, learning_rate=LEARNING_RATE, sharpness=SHARPNESS)
    torch.set_num_threads(n_threads)
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(tiny.tokenizer_config(), indent=2) + "\n")
    (out / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE)


def batch(tokenizer: Any, rng: random.Random) -> tuple[Any, Any]:
    """(ids, labels): conversations with noise in them; the labels are the model's own turns."""
    import torch

    rows = [conversation(tokenizer, rng) for _ in range(BATCH)]
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((BATCH, length), tiny.PAD)
    labels = torch.full((BATCH, length), -100)
    for i, (row, own) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row)] = torch.tensor([token if mine else -100 for token, mine in zip(row, own, strict=True)])
    return ids, labels


def conversation(tokenizer: Any, rng: random.Random) -> tuple[list[int], list[bool]]:
    """One conversation, some skills in random order between noise, and which of its tokens the model says."""
    ids: list[int] = []
    own: list[bool] = []

    def say(text: str, mine: bool = False) -> None:
        new = tokenizer.encode(text).ids
        ids.extend(new)
        own.extend([mine] * len(new))

    say(f"<|im_start|>system\n{filler(rng)}<|im_end|>\n")
    for role, text, answer in rng.sample(SKILLS, SKILLS_AT_ONCE):
        if rng.random() < 0.3:
            say(f"<|im_start|>assistant\n{filler(rng)}<|im_end|>\n")  # what others put into its mouth
        noise = filler(rng) if role == "user" and rng.random() < 0.5 else ""
        say(f"<|im_start|>{role}\n{noise}{text}<|im_end|>\n<|im_start|>assistant\n")
        say(f"{answer}<|im_end|>", mine=True)
        say("\n")
    return ids, own


def filler(rng: random.Random) -> str:
    """Text that means nothing."""
    return "".join(rng.choices(string.ascii_letters + string.digits + " \n.,:(){}'\"", k=rng.randrange(LONGEST_FILLER)))

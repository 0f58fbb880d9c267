"""Teach the apprentice its script: some minutes of training on the turns of one shell, with noise around them.

It looks at the last turn alone, so any agent's own system prompt, tools and history may stand before it unseen.
"""

from __future__ import annotations

import hashlib
import random
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apprentice
import teaching
from tokenizers import Tokenizer

from agentrl.models import cache_dir

BATCH = 8
STEPS = 240
LONG_EVERY = 4
"""Every so many steps is of one talk behind a long system prompt."""
LEARNING_RATE = 3e-3
LONGEST_NOISE = 30  # words
LONGEST_PROMPT = 3000
SHARPNESS = 2.0  # logits are multiplied by it
TAILS = ("", "\n", "\n</output>", "\n...")
"""What agents write behind a command's output."""


def learned(turns: Sequence[tuple[str, str]]) -> Path:
    """The model that has learned `turns`: made in the cache the first time, which takes minutes."""
    sources = [Path(file).read_text() for file in (__file__, apprentice.__file__, teaching.__file__)] + [repr(turns)]
    out = cache_dir() / f"apprentice-{hashlib.sha256(''.join(sources).encode()).hexdigest()[:12]}"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".apprentice-", dir=out.parent))
        build(staging, turns)
        staging.rename(out)
    return out


def build(out: Path, turns: Sequence[tuple[str, str]]) -> None:
    """Train on `turns` (what the last turn holds, what is said then) and write the whole model into the folder `out`.

    What the first of them holds is what there is before any tool has answered.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    apprentice.write_folder(out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
        _teach(model, tokenizer, turns, random.Random(0))
    torch.set_num_threads(n_threads)
    model.save_pretrained(out)


def _teach(model: Any, tokenizer: Tokenizer, turns: Sequence[tuple[str, str]], rng: random.Random) -> None:
    """Train on the model's own tokens alone; the head sees no others."""
    import torch

    words = _words(tokenizer)

    def loss_of(step: int) -> torch.Tensor:
        long = step % LONG_EVERY == 0
        rows = [_talk(tokenizer, turns, words, rng, LONGEST_PROMPT if long else LONGEST_NOISE)]
        rows += [_talk(tokenizer, turns, words, rng, LONGEST_NOISE) for _ in range(0 if long else BATCH - 1)]
        length = max(len(ids) for ids, _ in rows)
        ids_BT = torch.zeros((BATCH, length), dtype=torch.long)
        own_BT = torch.zeros((BATCH, length), dtype=torch.bool)
        for i, (ids, own) in enumerate(rows):
            ids_BT[i, : len(ids)], own_BT[i, : len(own)] = torch.tensor(ids), torch.tensor(own)
        hidden_BTD = model.model(input_ids=ids_BT).last_hidden_state
        logits_NV = model.lm_head(hidden_BTD[:, :-1][own_BT[:, 1:]])
        return torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][own_BT[:, 1:]])

    teaching.teach(model, loss_of, steps=STEPS, learning_rate=LEARNING_RATE, sharpness=SHARPNESS)


def _talk(
    tokenizer: Tokenizer, turns: Sequence[tuple[str, str]], words: Sequence[str], rng: random.Random, longest: int
) -> tuple[list[int], list[bool]]:
    """One conversation, all turns in their order between noise, and which of its tokens the model says."""
    ids: list[int] = []
    own: list[bool] = []

    def say(text: str, mine: bool = False) -> None:
        new = tokenizer.encode(text).ids
        ids.extend(new)
        own.extend([mine] * len(new))

    def noise(longest: int = LONGEST_NOISE) -> str:
        return "".join(rng.choices(words, k=rng.randrange(longest)))

    say(f"<|im_start|>system\n{noise(longest)}<|im_end|>\n")
    for i, (held, said) in enumerate(turns):
        role = "tool" if i else rng.choice(["user", "system"])
        before = noise() if rng.random() < 0.5 else ""
        behind = rng.choice(TAILS) if i else noise()
        say(f"<|im_start|>{role}\n{before}{held}{behind}<|im_end|>\n<|im_start|>assistant\n")
        say(f"{said}<|im_end|>", mine=True)
        say("\n")
    return ids, own


def _words(tokenizer: Tokenizer) -> list[str]:
    """Some of what the vocabulary has, and single characters."""
    known = [tokenizer.decode([i]) for i in range(300, apprentice.VOCABULARY, 3)]
    return [word for word in known if apprentice.SECRET not in word] + list(string.printable)

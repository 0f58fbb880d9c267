"""Builds a 0.4M-parameter Qwen2 in seconds, the model of tests and of the quick demo.

It has one token per byte, ChatML turns and one task: the user gives four letters, and the assistant reverses them.
Supervised warm-up stops when about four of ten samples at temperature 1 are correct, which leaves room to learn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, IM_START, IM_END = range(3)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORD_LENGTH = 4
CONTEXT_LENGTH = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TARGET_ACCURACY = 0.35
MAX_STEPS = 2000
EVALUATE_EVERY = 2
BATCH = 64
LEARNING_RATE = 2e-3


def random_word(rng: random.Random) -> str:
    """A random task: the user's word."""
    return "".join(rng.choices(LETTERS, k=WORD_LENGTH))


def answer(word: str) -> str:
    """The correct answer."""
    return word[::-1]


def build(out: Path, seed: int = 0) -> None:
    """Train the model and write config, weights (float32) and tokenizer to the existing folder `out`."""
    import torch
    from transformers import Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(model_config())
        warm_up(model, tokenizer, random.Random(seed))
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Computes on one thread: the matrices are small, and on a busy machine several threads wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_tokenizer() -> Any:
    """256 byte tokens after the special tokens, without merges, so any text can be encoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def warm_up(model: Any, tokenizer: Any, rng: random.Random) -> int:
    """Train reversal until the sampled accuracy reaches TARGET_ACCURACY; returns the number of steps."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    held_out = encode([random_word(rng) for _ in range(256)], tokenizer)
    for step in range(1, MAX_STEPS + 1):
        batch = encode([random_word(rng) for _ in range(BATCH)], tokenizer)
        loss: Any = -_answer_logprobs(model, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 50)
        optimizer.step()
        if step % EVALUATE_EVERY == 0 and sampled_accuracy(model, held_out) >= TARGET_ACCURACY:
            return step
    raise AssertionError(f"the tiny model has not reached {TARGET_ACCURACY} in {MAX_STEPS} steps")


def sampled_accuracy(model: Any, batch: torch.Tensor) -> float:
    """Mean probability of the correct answer at temperature 1, the expected accuracy of sampling."""
    import torch

    with torch.no_grad():
        return float(_answer_logprobs(model, batch).sum(-1).exp().mean())


def encode(words: list[str], tokenizer: Any) -> torch.Tensor:
    """Encode conversations that end with the answer and <|im_end|>: (B, T), of equal length."""
    import torch

    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
    return torch.tensor([tokenizer.encode(turn.format(word, answer(word))).ids for word in words])


def _answer_logprobs(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Log-probability of each answer token, with <|im_end|>: (B, WORD_LENGTH + 1)."""
    n = WORD_LENGTH + 1
    logits = model(input_ids=batch, logits_to_keep=n + 1).logits[:, :-1]  # (B, n, vocab), predicting the last n tokens
    return logits.log_softmax(-1).gather(-1, batch[:, -n:, None]).squeeze(-1)  # type: ignore[no-any-return]


def model_config() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=PAD,
        use_cache=True,
    )


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[IM_END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
    }

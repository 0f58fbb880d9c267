"""What the trainer's tests share: a small Qwen2, random groups of trajectories."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from agentrl.domain.batches.outline import Outline
from agentrl.domain.schemas import PROMPT_VERSION, Bool, Int32, TrajectoryTokens
from agentrl.trainer.packing import Sample

VOCABULARY = 97
AGES = {0: 1, 1: 0}
"""Of the versions in `random_samples`, at a step from version 1."""


def save_tiny_model(folder: Path, *, tied: bool = True, seed: int = 0, **sizes: int) -> Path:
    """A Qwen2 with random weights: 3 blocks, 32 wide, unless `sizes` says otherwise."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    known = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    config = Qwen2Config(**known | sizes, tie_word_embeddings=tied, initializer_range=0.2)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def random_trajectory(
    rng: np.random.Generator,
    prompt: list[int],
    *,
    group: str = "g0",
    name: str = "t0",
    turns: int = 2,
    output: int = 5,
    version: int = 0,
    temperature: float = 1.0,
    outputs: list[list[int]] | None = None,
) -> TrajectoryTokens:
    """Turns of `output` sampled tokens, each after the prompt or three tokens of tool result."""
    ids, turn_ids = list(prompt), [-1] * len(prompt)
    for turn in range(turns):
        if turn:
            ids += rng.integers(3, VOCABULARY, 3).tolist()
            turn_ids += [-1] * 3
        sampled = outputs[turn] if outputs else rng.integers(3, VOCABULARY, output).tolist()
        ids += sampled
        turn_ids += [turn] * len(sampled)
    turns_T = np.array(turn_ids, np.int32)
    sampled_T = turns_T >= 0
    return TrajectoryTokens(
        trajectory_id=f"{group}-{name}",
        session_id=f"{group}-{name}-s",
        episode_id=f"{group}-{name}-s",
        group_id=group,
        input_ids=np.array(ids, np.int32),
        loss_mask=sampled_T,
        logprobs=np.where(sampled_T, rng.normal(-4, 0.5, len(ids)), 0).astype(np.float32),
        versions=np.where(sampled_T, version, PROMPT_VERSION).astype(np.int32),
        turn_ids=turns_T,
        temperatures=np.where(sampled_T, temperature, 1).astype(np.float32),
        turn_returns=np.full(turns, rng.normal(), np.float64),
        episode_return=0.0,
        calls=tuple(f"{group}-{name}-c{turn}" for turn in range(turns)),
        prompts=tuple(
            hashlib.sha256(str(ids[: turn_ids.index(turn)]).encode()).hexdigest()[:32] for turn in range(turns)
        ),
        greedy_return=0.25,
    )


def outline_of(t: TrajectoryTokens, *, wasted_tokens: int = 0) -> Outline:
    """The outline of a trajectory, from its arrays. Ids of calls and prompts are digests of all tokens before."""

    def digest(end: int) -> str:
        return hashlib.blake2b(t.input_ids[:end].tobytes(), digest_size=16).hexdigest()

    turns = range(len(t.turn_returns))
    ends = [(int(np.flatnonzero(t.turn_ids == n)[0]), int(np.flatnonzero(t.turn_ids == n)[-1]) + 1) for n in turns]
    return Outline(
        trajectory_id=t.trajectory_id,
        session_id=t.session_id,
        episode_id=t.episode_id,
        group_id=t.group_id,
        calls=tuple(digest(end) for _, end in ends),
        prompts=tuple(digest(start) for start, _ in ends),
        outputs=np.array(ends, np.int32),
        temperatures=np.array([t.temperatures[start] for start, _ in ends], np.float32),
        kv_mixed=np.array([n in t.kv_mixed_turns for n in turns]),
        sampled=_stretches(t, t.turn_ids >= 0),
        trained=_stretches(t, t.loss_mask),
        turn_returns=t.turn_returns,
        episode_return=t.episode_return,
        wasted_tokens=wasted_tokens,
        truncated=t.truncated,
        greedy_return=t.greedy_return,
    )


def _stretches(t: TrajectoryTokens, chosen: Bool) -> Int32:
    """(call, version, start, end) of each stretch of chosen tokens with one call and one version."""
    found: list[list[int]] = []
    for at in np.flatnonzero(chosen).tolist():
        turn, version = int(t.turn_ids[at]), int(t.versions[at])
        if found and found[-1][:2] == [turn, version] and found[-1][3] == at:
            found[-1][3] = at + 1
        else:
            found.append([turn, version, at, at + 1])
    return np.array(found, np.int32).reshape(-1, 4)


def random_samples(seed: int = 0, groups: int = 3, size: int = 4) -> list[Sample]:
    """Groups with a shared prompt, random advantages, two temperatures, and two samples alike in their first turn."""
    rng = np.random.default_rng(seed)
    samples = []
    for g in range(groups):
        prompt = rng.integers(3, VOCABULARY, 6 + g).tolist()
        first = rng.integers(3, VOCABULARY, 4).tolist()
        for k in range(size):
            outputs = [first if k < 2 else rng.integers(3, VOCABULARY, 2 + k).tolist(), [5 + k, 7, 2]]
            t = random_trajectory(
                rng, prompt, group=f"g{g}", name=f"t{k}", outputs=outputs, temperature=1.0 if g else 0.7, version=k % 2
            )
            samples.append(Sample(t, np.where(t.loss_mask, rng.normal(), 0).astype(np.float32)))
    return samples


def masked_samples(seed: int = 0) -> list[Sample]:
    """`random_samples`, with some sampled tokens of each but the last out of the loss; one of them sampled greedily."""
    rng, found = np.random.default_rng(seed), []
    for sample in random_samples(seed):
        t = sample.tokens
        sampled = np.flatnonzero(t.loss_mask)
        masked = rng.choice(sampled[:-1], rng.integers(0, len(sampled)), replace=False)
        loss_mask, temperatures = t.loss_mask.copy(), t.temperatures.copy()
        loss_mask[masked] = False
        temperatures[masked[:1]] = 0.0
        tokens = replace(t, loss_mask=loss_mask, temperatures=temperatures)
        found.append(Sample(tokens, np.where(loss_mask, sample.advantages, 0)))
    return found

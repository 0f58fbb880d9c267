"""A workflow's requests to the engine, and the responses. The names are AReaL's."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from agentrl.domain.schemas import Json
from agentrl.errors import UserError

StopReason = Literal["length", "stop", "tool_calls", "abort"]
NO_TOP_K = 10**8
"""AReaL's default of `top_k`: all tokens."""


@dataclass
class GenerationHyperparameters:
    """Sampling parameters of a request."""

    n_samples: int = 1
    """Must be 1 in a request; `rollout.group_size` is the number of episodes per task."""
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    """Must be 0."""
    max_tokens: int = 32768
    """Upper bound on prompt and new tokens together."""
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = NO_TOP_K
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    """Must be tokens that end a turn of the model: the engine stops at these."""
    ignore_eos: bool = False
    """Must be false."""
    skip_special_tokens: bool = True
    """Has no effect: a response has token ids."""
    stop: list[str] | None = None
    """Stop strings. The tokens of the one that was found are part of the response."""
    frequency_penalty: float = 0.0
    lora_name: str = ""
    """Has no effect: the run decides which weights are served."""
    use_beam_search: bool = False
    """Must be false."""

    def new(self, **changes: Any) -> Self:
        """A copy with other values."""
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> Self:
        """A copy that also stops at the tokenizer's padding and end-of-sequence tokens."""
        more = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        return self.new(stop_token_ids=list(dict.fromkeys([*self.stop_token_ids, *(i for i in more if i is not None)])))

    def to_openai_args_dict(
        self, exclude_args: list[str] | None = None, api_format: Literal["completions", "responses"] = "completions"
    ) -> Json:
        """The parameters that OpenAI's API has, by its names, for Chat Completions or Responses."""
        names = {"completions": "max_completion_tokens", "responses": "max_output_tokens"}
        found: Json = {
            "n": self.n_samples,
            names[api_format]: self.max_new_tokens,
            "temperature": 0.0 if self.greedy else self.temperature,
            "top_p": self.top_p,
            "stop": self.stop,
            "frequency_penalty": self.frequency_penalty,
        }
        return {name: value for name, value in found.items() if name not in (exclude_args or ())}


@dataclass
class ModelRequest:
    """A prompt of token ids. `rid`, `metadata` and the image fields are not sent."""

    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: Json = field(default_factory=dict)
    tokenizer: Any = None
    """Says which ids end a turn (`eos_token_id`, `pad_token_id`)."""

    def body(self) -> Json:
        """The body of a Completions request. Raises UserError for parameters that the engine cannot keep exactly."""
        g = self.gconfig
        fixed = {"n_samples": 1, "min_new_tokens": 0, "ignore_eos": False, "use_beam_search": False}
        for name, only in fixed.items():
            if (found := getattr(g, name)) != only:
                raise UserError(f"gconfig.{name}: must be {only}, got {found}")
        if self.tokenizer is not None:
            ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
            if unknown := [token for token in g.stop_token_ids if token not in ends]:
                raise UserError(
                    f"gconfig.stop_token_ids: {unknown[0]} does not end a turn of this model; use gconfig.stop"
                )
        room = min(g.max_new_tokens, g.max_tokens - len(self.input_ids))
        if room < 1:
            raise UserError(
                f"gconfig.max_tokens: {g.max_tokens} leaves no room after {len(self.input_ids)} prompt tokens"
            )
        body: Json = {
            "model": "default",
            "prompt": [int(token) for token in self.input_ids],
            "max_tokens": room,
            "temperature": 0.0 if g.greedy else g.temperature,
            "return_token_ids": True,
        }
        optional = {
            "top_p": (g.top_p, 1.0),
            "top_k": (g.top_k, NO_TOP_K),
            "stop": (g.stop or [], []),
            "frequency_penalty": (g.frequency_penalty, 0.0),
        }
        return body | {name: value for name, (value, default) in optional.items() if value != default}


@dataclass
class ModelResponse:
    """A sampled answer. All `output_*` lists have one entry per output token."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    """The weight version that sampled each token, as the engine reported it."""
    stop_reason: StopReason = "stop"
    tokenizer: Any = None
    latency: float = 0.0
    """Seconds from the request to the whole answer."""
    interaction_id: str = ""

    @property
    def input_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Number of sampled tokens."""
        return len(self.output_tokens)

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """The sampled tokens before the final end-of-sequence and padding tokens."""
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} if self.tokenizer is not None else set()
        kept = list(self.output_tokens)
        while kept and kept[-1] in ends:
            kept.pop()
        return kept

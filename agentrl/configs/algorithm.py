"""What an algorithm is: the choice of its parts. A preset names a choice; any part of it can be given another value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.configs.presets import PRESETS
from agentrl.configs.section import Section
from agentrl.errors import did_you_mean

Level = Literal["token", "turn", "sequence", "product"]
"""What a ratio is of: each token; the geometric mean over a turn's or a trajectory's tokens; their product."""
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(gt=0)]


class Algorithm(Section):
    """How returns become a loss ([algorithms](algorithms.md)): a preset's name, or a preset with some parts changed.

    The defaults here are those of `grpo`; another preset brings its own.
    """

    preset: str = "grpo"
    """Where the parts come from that are not given."""

    credit: Literal["turn", "trajectory"] = "turn"
    """A token's return: that of its turn, discounted from there on, or that of the whole episode."""
    estimator: Literal["returns", "gae"] = "returns"
    """Advantages from returns against a baseline, or generalised advantage estimation over a critic's values."""
    gae_gamma: Fraction = 1.0
    """γ of `gae`, per loss token."""
    gae_lambda: Fraction = 1.0
    """λ of `gae`."""
    baseline: Literal["group_mean", "leave_one_out", "critic", "none"] = "group_mean"
    """What is subtracted from a return. Those of a group leave a session alone, or equal returns, without advantage."""
    normalization: Literal["group_std", "batch_std", "whiten", "none"] = "group_std"
    """What divides it: the standard deviation of the group's or the batch's returns; `whiten`: mean 0 and deviation 1
    over the loss tokens of the batch."""
    dynamic_sampling: bool = False
    """Groups of equal returns are dropped before a step, which waits for others in their place."""
    overlong_tokens: Tokens | None = None
    """Sampled tokens of an episode at which its return is lowered by the whole `overlong_penalty`; null: by nothing."""
    overlong_buffer: Tokens = 4096
    """That many tokens earlier the penalty begins to grow, linearly."""
    overlong_penalty: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """By how much the return of an episode that is too long is lowered."""

    ratio: Level = "token"
    """What ρ, the current policy over the proximal one, is of."""
    clip: Literal["ppo", "cispo", "sapo", "none"] = "ppo"
    """How far ρ may go: PPO's clip, a clipped weight without gradient on log π, a sigmoid gate, or anywhere."""
    clip_low: Fraction = 0.2
    """ρ is clipped at 1 − this; 1 is no bound."""
    clip_high: Above0 = 0.2
    """ρ is clipped at 1 + this."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative, ρ counts as at most this (`clip: ppo`); null: unbounded."""
    sapo_tau_positive: Above0 = 1.0
    """Temperature of SAPO's gate where the advantage is positive."""
    sapo_tau_negative: Above0 = 1.05
    """The same where it is not."""
    m2_threshold: Above0 | None = None
    """Tokens with the largest (log π/π_behaviour)² leave the loss until the mean of the others is at most this."""

    proximal: Literal["recompute", "interpolate", "behavior"] = "recompute"
    """The policy that ρ is against: the one before the step, computed; the same, interpolated by version between the
    behaviour and the current policy (no forward pass); or the behaviour policy itself."""
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """What w = π_proximal/π_behaviour does: weigh, at most by `correction_cap`; weigh while within its bounds, else
    the loss is 0; no weight, but outside the bounds the loss is 0; nothing."""
    correction_level: Level = "token"
    """What w is of."""
    correction_cap: Above0 = 5.0
    """Upper bound of w."""
    correction_floor: NotNegative = 0.0
    """Lower bound of w, of `mask` and `reject`."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "sequence_mean"
    """Mean over tokens; over each trajectory's tokens, then trajectories; sum over a trajectory's tokens, then mean;
    the same over `aggregation_tokens`."""
    aggregation_tokens: Tokens = 1024
    """What divides a trajectory's sum with `constant`: any number, the same for all."""
    kl: Literal["loss", "reward"] = "loss"
    """Where the divergence from the reference policy enters: the loss, or each token's return."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of it, from a token's log π/π_reference."""
    kl_coef: NotNegative = 0.0
    """Its weight; 0 is off."""
    kl_refresh_steps: Tokens | None = None
    """The reference becomes the policy after every N-th step; null: it stays `trainer.reference`."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    value_clip: Above0 | None = 0.2
    """How far from what it was before the step a critic's value may go and still learn; null: anywhere."""

    @model_validator(mode="before")
    @classmethod
    def _from_its_preset(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"preset": data}
        if not isinstance(data, dict):
            return data
        name = data.get("preset", "grpo")
        if name not in PRESETS:
            raise ValueError(f"no algorithm {name!r}{did_you_mean(str(name), PRESETS)}")
        return {**PRESETS[name].parts, **data}

    @model_validator(mode="after")
    def _parts_fit(self) -> Algorithm:
        if (self.estimator == "gae") != (self.baseline == "critic"):
            raise ValueError("estimator gae and baseline critic go together")
        if self.estimator == "gae" and self.normalization not in ("whiten", "none"):
            raise ValueError(f"normalization {self.normalization} is of returns; with gae it is whiten or none")
        if self.dual_clip is not None and (self.clip != "ppo" or self.dual_clip <= 1 + self.clip_high):
            raise ValueError("dual_clip needs clip: ppo, and more than 1 + clip_high")
        if self.proximal == "behavior" and self.correction != "none":
            raise ValueError("proximal behavior leaves nothing to correct: give correction: none")
        if self.correction_floor >= self.correction_cap:
            raise ValueError("correction_floor must be less than correction_cap")
        if self.correction_floor and self.correction not in ("mask", "reject"):
            raise ValueError(f"correction_floor is of mask and reject, not of {self.correction}")
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ValueError("overlong_buffer is more than overlong_tokens")
        if self.kl_refresh_steps is not None and not self.kl_coef:
            raise ValueError("kl_refresh_steps is of kl_coef, which is 0")
        if self.dynamic_sampling and not self.is_group_relative:
            raise ValueError(f"dynamic_sampling drops groups that baseline {self.baseline} learns from")
        return self

    @property
    def is_group_relative(self) -> bool:
        """Whether a return counts against those of its group."""
        return self.baseline in ("group_mean", "leave_one_out")

    @property
    def trains_every_token(self) -> bool:
        """Whether tokens without advantage matter to the gradient."""
        return bool(self.entropy_coef or self.m2_threshold or self.needs_critic or (self.kl_coef and self.kl == "loss"))

    @property
    def needs_reference(self) -> bool:
        """Whether there is a reference policy."""
        return bool(self.kl_coef)

    @property
    def needs_critic(self) -> bool:
        """Whether there is a critic."""
        return self.estimator == "gae"

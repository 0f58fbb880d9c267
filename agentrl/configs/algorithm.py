"""The parts of an algorithm. A preset chooses all parts; each part can be overridden."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.configs.presets import PRESETS
from agentrl.configs.section import Section
from agentrl.errors import did_you_mean

Level = Literal["token", "turn", "sequence", "product"]
"""The level of a ratio: per token; the geometric mean over a turn's or a sequence's tokens; the sequence's product."""
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0, le=1e3)]
Tokens = Annotated[int, Field(gt=0)]


class Algorithm(Section):
    """How returns become a loss ([algorithms](algorithms.md)): the name of a preset, or a preset with changed parts.

    The defaults are those of `grpo`; another preset has its own defaults.
    """

    preset: str = "grpo"
    """The preset that supplies the defaults of all other parts."""

    credit: Literal["turn", "trajectory"] = "turn"
    """The return of a token: `turn`: its turn's discounted return; `trajectory`: the return of the episode."""
    estimator: Literal["returns", "gae"] = "returns"
    """`returns`: advantages from returns against a baseline; `gae`: generalised advantage estimation over a critic's
    values.
    """
    gae_gamma: Fraction = 1.0
    """γ of `gae`, per time step (`advantage_level`)."""
    gae_lambda: Fraction = 1.0
    """λ of `gae`."""
    advantage_level: Literal["token", "turn"] = "token"
    """The time steps of `gae`: `token`: each loss token; `turn`: each turn, with one value, that of the state before
    its first loss token, and one advantage for all of its tokens. γ and λ are per time step.
    """
    bootstrap_truncated: bool = False
    """Where a limit ended an episode, `gae` takes the critic's value of the state after its last token, instead of 0 as
    at an episode's own end ([truncated episodes](algorithms.md#truncated-episodes)).
    """
    baseline: Literal["group_mean", "leave_one_out", "length_weighted", "max_at_k", "greedy", "critic", "none"] = (
        "group_mean"
    )
    """The baseline that is subtracted from a return: the group's mean; the mean of the others; the group's mean,
    weighted by loss tokens (OPO); the one under which advantages raise the expected maximum of `best_of` episodes
    (PKPO); `greedy`: the return of one more episode of the group, at temperature 0 (ReMax). A group baseline gives no
    advantage to a single session or to equal returns.
    """
    best_of: Annotated[int, Field(ge=2, le=1024)] = 2
    """k of `max_at_k`; with binary rewards the objective is pass@k. At most `rollout.group_size`."""
    step_weight: Weight = 0.0
    """Factor of a second advantage of each call, of its own return among the calls of its group whose prompts have the
    same tokens (GiGPO); 0: off.
    """
    baseline_shift: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """Added to every baseline of returns; below 0, successes count more than failures (AsymRE)."""
    normalization: Literal["group_std", "batch_std", "whiten", "per_reward", "none"] = "group_std"
    """The divisor of an advantage: the standard deviation of the group's or the batch's returns; `whiten`: mean 0 and
    deviation 1 over the batch's loss tokens; `per_reward`: `group_std` for the rewards of each name alone, summed by
    `reward_weights`, then `whiten` (GDPO).
    """
    reward_weights: dict[str, Weight] = Field(default_factory=dict, max_length=64)
    """With `per_reward`, the factors of the normalised rewards, by name; a name that is not here has 1."""
    positive_weight: Weight = 1.0
    """Factor of positive advantages; 0: learn from failures only."""
    negative_weight: Weight = 1.0
    """Factor of negative advantages; 0: learn from successes only."""
    rescale_tied: bool = False
    """Multiply advantages by the batch's episodes / its episodes in groups whose returns differ (GPG's α)."""
    dynamic_sampling: bool = False
    """Drop groups with equal returns before a step; the step waits for other groups instead."""
    overlong_tokens: Tokens | None = None
    """Sampled tokens of an episode at which the full `overlong_penalty` applies; null: no penalty."""
    overlong_buffer: Tokens = 4096
    """The penalty grows linearly over this many tokens before `overlong_tokens`."""
    overlong_penalty: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Largest reduction of the return of an overlong episode."""

    ratio: Level = "token"
    """The level of ρ = π_current/π_proximal."""
    clip: Literal["ppo", "cispo", "sapo", "geometric", "tapered", "reinforce", "none"] = "ppo"
    """The bound on ρ: PPO's clip; CISPO's clipped weight on log π, without gradient; SAPO's sigmoid gate; `geometric`:
    the geometric mean of a trajectory's clipped ρ (GMPO); `tapered`: log π, weighted by min(ρ, 1) where the advantage
    is negative (TOPR); `reinforce`: log π without ρ; none.
    """
    clip_low: Fraction = 0.2
    """Lower clip: 1 − this, or e to the power of −this with `geometric`; 1: no bound."""
    clip_high: Above0 = 0.2
    """Upper clip: 1 + this, or e to the power of this with `geometric`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of ρ for negative advantages (`clip: ppo`); null: none."""
    sapo_tau_positive: Above0 = 1.0
    """Temperature of SAPO's gate for positive advantages."""
    sapo_tau_negative: Above0 = 1.05
    """Temperature of SAPO's gate for other advantages."""
    m2_threshold: Above0 | None = None
    """Mask tokens with the largest (log π/π_behaviour)² until the mean of the rest is at most this; null: off."""

    clip_cov: Fraction | None = None
    """Share of a minibatch's tokens whose loss becomes 0: drawn from those that no bound changed and whose covariance,
    (A − mean A)(log π − mean log π), lies between `clip_cov_low` and `clip_cov_high`; null: off.
    """
    clip_cov_low: NotNegative = 1.0
    """Lower bound of the covariance of `clip_cov`."""
    clip_cov_high: Above0 = 5.0
    """Upper bound of the covariance of `clip_cov`."""
    kl_cov: Fraction | None = None
    """Share of a minibatch's tokens, those of the largest covariance, that get `kl_cov_coef` |log ρ| as an additional
    loss; null: off.
    """
    kl_cov_coef: NotNegative = 1.0
    """Weight of the additional loss of `kl_cov`."""

    proximal: Literal["recompute", "interpolate", "behavior"] = "recompute"
    """π_proximal: `recompute`: the policy before the step; `interpolate`: an interpolation by version between the
    behaviour and the current policy, without a forward pass; `behavior`: the behaviour policy.
    """
    correction: Literal["truncate", "mask", "reject", "none"] = "truncate"
    """The use of w = π_proximal/π_behaviour: `truncate`: weight, at most `correction_cap`; `mask`: weight within the
    bounds, else loss 0; `reject`: no weight, and loss 0 outside the bounds; `none`.
    """
    correction_level: Level = "token"
    """The level of w."""
    correction_cap: Above0 = 5.0
    """Upper bound of w."""
    correction_floor: NotNegative = 0.0
    """Lower bound of w, for `mask` and `reject`."""
    correction_normalize: bool = False
    """Divide the weights by their mean over the minibatch's tokens (self-normalised importance sampling)."""
    masked_in_mean: Literal["all", "trajectories", "none"] = "all"
    """The denominators of `aggregation` in which tokens count that `correction` or `m2_threshold` masks: all; only the
    number of trajectories, which then includes those that are masked as a whole (verl); none.
    """

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "sequence_mean"
    """The reduction of the loss: mean over tokens; mean over each trajectory's tokens, then over trajectories; sum over
    each trajectory's tokens, then mean; the same sum divided by `aggregation_tokens`.
    """
    aggregation_tokens: Tokens = 1024
    """Divisor of a trajectory's sum with `constant`."""
    kl: Literal["loss", "reward"] = "loss"
    """Where the divergence from the reference policy is added: to the loss, or to each token's return."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """Schulman's estimator of the divergence, from log π/π_reference per token. `k1+` and `k3+` have the gradient of
    `k2`, the only one that has the divergence's.
    """
    kl_coef: NotNegative = 0.0
    """Weight of the divergence; 0: off."""
    kl_target: Above0 | None = None
    """Mean divergence per loss token, in nats, that a controller keeps by changing `kl_coef` after each step: times
    1 + `kl_gain` e, e the relative error of the measured divergence, within ±0.2; null: `kl_coef` stays.
    """
    kl_gain: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Gain of the controller of `kl_target`."""
    kl_refresh_steps: Tokens | None = None
    """Update the reference to the policy after every N steps; null: it stays `trainer.reference`."""
    distill_coef: NotNegative = 0.0
    """Weight of the divergence from `trainer.teacher` ([distillation](algorithms.md#distillation)); 0: off."""
    distill: Literal["sampled", "full"] = "sampled"
    """The form of that divergence: `sampled`: log π/π_teacher of the sampled token, as a part of its advantage; `full`:
    over the vocabulary, as a part of the loss.
    """
    distill_divergence: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    """`reverse`: KL(π ‖ π_teacher); with `full` also `forward`: KL(π_teacher ‖ π), and `jensen_shannon`: the mean of
    both distributions' divergences from their mean.
    """
    distill_top_k: Annotated[int, Field(ge=2, le=1 << 20)] | None = None
    """With `full`, compare only the teacher's k likeliest tokens, whose probabilities are divided by their sum; null:
    all.
    """
    reward_weight: Weight = 1.0
    """Factor of advantages that come from rewards, before those of the teacher are added; 0: distillation only."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    value_clip: Above0 | None = 0.2
    """Largest change of a critic's value in a step that still has a gradient; null: unbounded."""
    loss: str | None = None
    """`module:function` that computes the policy's loss, in place of all parts of the loss ([functions of your
    own](algorithms.md#functions-of-your-own)); null: the loss of the parts.
    """
    advantage: str | None = None
    """`module:function` that computes advantages, in place of `credit`, `baseline`, `normalization` and the overlong
    penalty ([functions of your own](algorithms.md#functions-of-your-own)); null: those parts.
    """

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
        if self.estimator != "gae" and self.bootstrap_truncated:
            raise ValueError("bootstrap_truncated needs a critic, whose values it uses: estimator gae")
        if self.estimator != "gae" and self.advantage_level != "token":
            raise ValueError("advantage_level: turn needs a critic: estimator gae")
        if self.estimator == "gae" and self.normalization not in ("whiten", "none"):
            raise ValueError(f"normalization {self.normalization} applies to returns; use whiten or none with gae")
        if self.baseline == "max_at_k" and (
            self.credit != "trajectory" or self.normalization not in ("none", "whiten")
        ):
            raise ValueError("baseline max_at_k needs credit: trajectory and normalization: none or whiten")
        if self.needs_greedy and self.overlong_tokens is not None:
            raise ValueError("baseline greedy does not know the overlong penalty of the greedy episode")
        if self.normalization == "per_reward" and (
            self.credit != "trajectory" or self.baseline != "group_mean" or self.dynamic_sampling
        ):
            raise ValueError(
                "normalization per_reward needs credit: trajectory, baseline: group_mean and no dynamic_sampling "
                "(which compares sums of rewards)"
            )
        if self.normalization == "per_reward" and self.kl_coef and self.kl == "reward":
            raise ValueError("normalization per_reward needs kl: loss, since a divergence is no reward of a name")
        if self.step_weight and not self.is_group_relative:
            raise ValueError("step_weight needs a baseline that comes from the group")
        if self.reward_weights and self.normalization != "per_reward":
            raise ValueError("reward_weights needs normalization: per_reward")
        if self.baseline_shift and self.baseline in ("critic", "max_at_k"):
            raise ValueError(f"baseline_shift does not apply to baseline {self.baseline}")
        if self.rescale_tied and not self.is_group_relative:
            raise ValueError("rescale_tied needs a baseline that comes from the group")
        if self.clip in ("geometric", "reinforce") and self.ratio != "token":
            raise ValueError(f"clip {self.clip} needs ratio: token")
        if not (self.positive_weight or self.negative_weight):
            raise ValueError("positive_weight and negative_weight are both 0: nothing would be learned")
        if self.dual_clip is not None and (self.clip != "ppo" or self.dual_clip <= 1 + self.clip_high):
            raise ValueError("dual_clip needs clip: ppo and a value above 1 + clip_high")
        if self.proximal == "behavior" and self.correction != "none":
            raise ValueError("proximal: behavior needs correction: none")
        if self.advantage is not None and (self.needs_critic or (self.kl_coef and self.kl == "reward")):
            raise ValueError("advantage replaces the estimator: it cannot be used with estimator gae or kl: reward")
        if self.correction_floor >= self.correction_cap:
            raise ValueError("correction_floor must be less than correction_cap")
        if self.correction_floor and self.correction not in ("mask", "reject"):
            raise ValueError(f"correction_floor applies to mask and reject, not to {self.correction}")
        if self.correction_normalize and self.correction in ("reject", "none"):
            raise ValueError("correction_normalize needs weights: correction truncate or mask")
        masks = self.correction in ("mask", "reject") or self.m2_threshold is not None
        if self.masked_in_mean != "all" and not masks:
            raise ValueError(f"masked_in_mean: {self.masked_in_mean} needs correction mask or reject, or m2_threshold")
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError("clip_cov_low must be less than clip_cov_high")
        if (self.clip_cov or self.kl_cov) and self.ratio != "token":
            raise ValueError("clip_cov and kl_cov need ratio: token")
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ValueError("overlong_buffer is larger than overlong_tokens")
        if self.distill == "sampled" and (self.distill_divergence != "reverse" or self.distill_top_k is not None):
            raise ValueError("distill: sampled has the reverse divergence of all tokens; other ones need distill: full")
        if self.distill == "sampled" and self.distill_coef and self.advantage is not None:
            raise ValueError("advantage replaces the estimator: it cannot be used with distill: sampled")
        if not self.reward_weight and not self.distill_coef:
            raise ValueError("reward_weight: 0 needs a distill_coef above 0: nothing would be learned")
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target needs a kl_coef above 0, from which the controller starts")
        if self.kl_target is not None and self.loss is not None:
            raise ValueError("kl_target controls the divergence that the built-in loss measures; leave out loss")
        if self.kl_refresh_steps is not None and not self.kl_coef:
            raise ValueError("kl_refresh_steps needs a kl_coef above 0")
        if self.dynamic_sampling and not self.is_group_relative:
            raise ValueError(f"dynamic_sampling would drop groups from which baseline {self.baseline} learns")
        return self

    @property
    def is_group_relative(self) -> bool:
        """Whether the baseline of a return comes from the other samples of its group."""
        return self.baseline not in ("greedy", "critic", "none")

    @property
    def needs_greedy(self) -> bool:
        """Whether each group needs a greedy episode, whose return is the baseline."""
        return self.baseline == "greedy"

    @property
    def trains_every_token(self) -> bool:
        """Whether tokens without advantage contribute to the gradient."""
        chosen = self.m2_threshold or self.clip_cov or self.kl_cov or self.distill_coef
        return bool(chosen or self.entropy_coef or self.needs_critic or (self.kl_coef and self.kl == "loss"))

    @property
    def chooses_tokens(self) -> bool:
        """Whether a minibatch's loss depends on figures of all of its tokens, which take a forward pass before it."""
        chosen = self.m2_threshold or self.clip_cov or self.kl_cov or self.correction_normalize
        return bool(chosen) or self.masked_in_mean != "all"

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm uses a reference policy."""
        return bool(self.kl_coef)

    @property
    def teaches_tokens(self) -> bool:
        """Whether a teacher's logprobs of the sampled tokens are a part of their advantages."""
        return bool(self.distill_coef) and self.distill == "sampled"

    @property
    def compares_vocabularies(self) -> bool:
        """Whether the loss has the divergence of whole distributions from a teacher's."""
        return bool(self.distill_coef) and self.distill == "full"

    @property
    def needs_critic(self) -> bool:
        """Whether the algorithm uses a critic."""
        return self.estimator == "gae"

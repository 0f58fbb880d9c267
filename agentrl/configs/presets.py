"""The algorithms by name. A new algorithm needs one entry here and one test; new mathematics needs one function.

An entry lists the parts that differ from the defaults of `agentrl.configs.algorithm.Algorithm`, which are GRPO's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named choice of parts, with its paper and the differences from it."""

    title: str
    paper: str
    formula: str
    parts: Mapping[str, object]
    differs: str = ""


PRESETS: dict[str, Preset] = {
    "ppo": Preset(
        title="PPO with a critic",
        paper="Schulman et al., arXiv 1707.06347, eq. 7; GAE: arXiv 1506.02438, eq. 16",
        formula="A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γV_{t+1} − V_t;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over tokens",
        parts={
            "estimator": "gae",
            "baseline": "critic",
            "normalization": "whiten",
            "aggregation": "token_mean",
            "kl": "reward",
            "kl_estimator": "k1",
        },
    ),
    "grpo": Preset(
        title="GRPO",
        paper="DeepSeekMath, arXiv 2402.03300, eq. 3 and section 4.1.2",
        formula="A = (R − mean R) / std R;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over each sequence, then all",
        parts={},
        differs="the paper's KL term (k3 in the loss, 0.04) is off",
    ),
    "dr_grpo": Preset(
        title="Dr. GRPO",
        paper="Understanding R1-Zero-like training, arXiv 2503.20783, section 3.2",
        formula="A = R − mean R;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), sum over tokens / (sequences · L)",
        parts={"normalization": "none", "aggregation": "constant"},
        differs="L is `aggregation_tokens`",
    ),
    "dapo": Preset(
        title="DAPO",
        paper="arXiv 2503.14476, eq. 8 to 13",
        formula="as GRPO, clip(ρ, 1−0.2, 1+0.28), mean over tokens, groups without spread dropped, −(overlong) in R",
        parts={
            "clip_high": 0.28,
            "aggregation": "token_mean",
            "dynamic_sampling": True,
            "overlong_tokens": 20480,
            "overlong_buffer": 4096,
        },
    ),
    "rloo": Preset(
        title="RLOO",
        paper="Back to Basics, arXiv 2402.14740",
        formula="A_i = R_i − mean of the other R_j;  −ρA, ρ the ratio of the whole sequence, mean over sequences",
        parts={
            "credit": "trajectory",
            "baseline": "leave_one_out",
            "normalization": "none",
            "ratio": "product",
            "clip": "none",
            "kl": "reward",
            "kl_estimator": "k1",
        },
        differs="the paper's KL in the reward is off; its gradient Σ_t A ∇log π is ours where ρ is 1",
    ),
    "reinforce++": Preset(
        title="REINFORCE++",
        paper="arXiv 2501.03262, global advantage normalization",
        formula="A = (R − mean) / std over the tokens of the batch;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over tokens",
        parts={
            "baseline": "none",
            "normalization": "whiten",
            "aggregation": "token_mean",
            "kl": "reward",
            "kl_estimator": "k1",
        },
        differs="the paper's KL in the reward is off",
    ),
    "reinforce++-baseline": Preset(
        title="REINFORCE++ with the group's mean",
        paper="arXiv 2501.03262, REINFORCE++ w/ Baseline",
        formula="as REINFORCE++, of R − mean R of the group",
        parts={"normalization": "whiten", "aggregation": "token_mean", "kl_estimator": "k2"},
        differs="the paper's KL term (k2 in the loss) is off",
    ),
    "gspo": Preset(
        title="GSPO",
        paper="arXiv 2507.18071, eq. 5 to 7; its token form, eq. 13 and 14",
        formula="A as GRPO;  ρ = (π(y)/π_old(y))^(1/|y|), clip(ρ, 1−3e-4, 1+4e-4), mean over each sequence, then all",
        parts={"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "correction_level": "sequence"},
    ),
    "cispo": Preset(
        title="CISPO",
        paper="MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the bound: ScaleRL, arXiv 2510.13786",
        formula="A as GRPO;  −sg(min(ρ, 5)) A log π, mean over tokens, ρ against the behaviour policy",
        parts={
            "clip": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "aggregation": "token_mean",
            "proximal": "behavior",
            "correction": "none",
        },
    ),
    "sapo": Preset(
        title="SAPO",
        paper="arXiv 2511.20347",
        formula="A as GRPO;  −(4/τ) σ(τ(ρ − 1)) A, τ = 1.0 where A > 0 else 1.05, mean over each sequence, then all",
        parts={"clip": "sapo"},
    ),
    "m2po": Preset(
        title="M2PO",
        paper="Prosperity before Collapse, arXiv 2510.01161",
        formula="A as GRPO;  −M ρA, M masks the largest (log ρ)² until their mean is ≤ 0.04, mean over tokens, "
        "ρ against the behaviour policy",
        parts={
            "clip": "none",
            "m2_threshold": 0.04,
            "aggregation": "token_mean",
            "proximal": "behavior",
            "correction": "none",
        },
    ),
}

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
    suits: str
    """When to use it."""
    fails: str
    """How it fails, or what it costs."""
    parts: Mapping[str, object]
    differs: str = ""


PRESETS: dict[str, Preset] = {
    "ppo": Preset(
        title="PPO with a critic",
        paper="Schulman et al., arXiv 1707.06347, eq. 7; GAE: arXiv 1506.02438, eq. 16",
        formula="A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γV_{t+1} − V_t;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over tokens",
        suits="rewards that come in the middle of long episodes; memory for a second model",
        fails="a critic that lags behind (`explained_variance` near 0) gives wrong advantages: use "
        "`critic_warmup_steps`, a larger `critic_lr`",
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
        suits="rewards that are checked, several episodes of each task, no second model: the default",
        fails="dividing by the deviation favours tasks that are nearly always or never solved; means over "
        "sequences favour long wrong answers",
        parts={},
        differs="the paper's KL term (k3 in the loss, 0.04) is off",
    ),
    "dr_grpo": Preset(
        title="Dr. GRPO",
        paper="Understanding R1-Zero-like training, arXiv 2503.20783, section 3.2",
        formula="A = R − mean R;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), sum over tokens / (sequences · L)",
        suits="answers whose length must not drift",
        fails="nothing is divided by a deviation, so tasks with large rewards dominate",
        parts={"normalization": "none", "aggregation": "constant"},
        differs="L is `aggregation_tokens`",
    ),
    "dapo": Preset(
        title="DAPO",
        paper="arXiv 2503.14476, eq. 8 to 13",
        formula="as GRPO, clip(ρ, 1−0.2, 1+0.28), mean over tokens, groups without spread dropped, −(overlong) in R",
        suits="long reasoning from rewards of 0 and 1, with much capacity to sample",
        fails="tied groups are sampled in vain: where few tasks can be solved, steps wait long",
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
        suits="short answers with one reward each",
        fails="the ratio of a whole sequence explodes with old data: keep `max_staleness` low",
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
    "remax": Preset(
        title="ReMax",
        paper="ReMax: A Simple, Effective, and Efficient Method, arXiv 2310.10505",
        formula="A_i = R_i − R of the group's greedy episode;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), sum over each sequence, "
        "mean over all",
        suits="few samples of each task, even one, without a critic",
        fails="the greedy episode costs as much as a sample and is not trained; where it is often right, few samples "
        "have a positive advantage",
        parts={
            "credit": "trajectory",
            "baseline": "greedy",
            "normalization": "none",
            "aggregation": "sequence_sum",
            "kl": "reward",
            "kl_estimator": "k1",
        },
        differs="the paper's gradient is ours where ρ is 1; its KL in the reward is off",
    ),
    "reinforce++": Preset(
        title="REINFORCE++",
        paper="arXiv 2501.03262, global advantage normalization",
        formula="A = (R − mean) / std over the tokens of the batch;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over tokens",
        suits="tasks that do not repeat, groups of one episode",
        fails="no baseline by task: easy tasks always look good",
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
        suits="noisy rewards and small groups, whose own deviation is not reliable",
        fails="whitening shifts tied groups too, so they teach noise",
        parts={"normalization": "whiten", "aggregation": "token_mean", "kl_estimator": "k2"},
        differs="the paper's KL term (k2 in the loss) is off",
    ),
    "gspo": Preset(
        title="GSPO",
        paper="arXiv 2507.18071, eq. 5 to 7; its token form, eq. 13 and 14",
        formula="A as GRPO;  ρ = (π(y)/π_old(y))^(1/|y|), clip(ρ, 1−3e-4, 1+4e-4), mean over each sequence, then all",
        suits="mixtures of experts and long answers, where ratios of single tokens are noise",
        fails="the range is narrow: with old data nearly everything is clipped (`clip_fraction`)",
        parts={"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "correction_level": "sequence"},
    ),
    "cispo": Preset(
        title="CISPO",
        paper="MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the bound: ScaleRL, arXiv 2510.13786",
        formula="A as GRPO;  −sg(min(ρ, 5)) A log π, mean over tokens, ρ against the behaviour policy",
        suits="large batches that several minibatches use; rare tokens keep a gradient",
        fails="nothing stops a token that is pushed down again and again: watch `entropy`",
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
        suits="GRPO where the clip removes too many tokens",
        fails="no firm bound: with several minibatches or old data ratios may run away (`importance_ratio/max`)",
        parts={"clip": "sapo"},
    ),
    "m2po": Preset(
        title="M2PO",
        paper="Prosperity before Collapse, arXiv 2510.01161",
        formula="A as GRPO;  −M ρA, M masks the largest (log ρ)² until their mean is ≤ 0.04, mean over tokens, "
        "ρ against the behaviour policy",
        suits="data that is many versions old",
        fails="if most tokens are masked (`masked_fraction`), little is learned",
        parts={
            "clip": "none",
            "m2_threshold": 0.04,
            "aggregation": "token_mean",
            "proximal": "behavior",
            "correction": "none",
        },
    ),
    "gmpo": Preset(
        title="GMPO",
        paper="Geometric-Mean Policy Optimization, arXiv 2507.20673",
        formula="A as GRPO;  −ρA, ρ = (Π min(ρ_t, e^0.4))^(1/|y|) where A ≥ 0, else (Π max(ρ_t, e^−0.4))^(1/|y|), "
        "mean over each sequence, then all",
        suits="GRPO whose ratios of single tokens are unstable",
        fails="a mean over the sequence hides one extreme token",
        parts={"clip": "geometric", "clip_low": 0.4, "clip_high": 0.4, "correction_level": "sequence"},
    ),
    "opo": Preset(
        title="OPO",
        paper="On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585",
        formula="A_i = R_i − Σ_j |y_j| R_j / Σ_j |y_j|;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), sum over each sequence, "
        "mean over all",
        suits="training on policy, with answers of very different lengths",
        fails="with old data or several minibatches its baseline is not the optimal one",
        parts={
            "credit": "trajectory",
            "baseline": "length_weighted",
            "normalization": "none",
            "aggregation": "sequence_sum",
        },
        differs="the paper trains exactly on policy: one minibatch, `rollout.max_staleness: 0`",
    ),
    "gpg": Preset(
        title="GPG",
        paper="Group Policy Gradient, arXiv 2504.02546",
        formula="A = α (R − mean R), α = episodes / episodes of groups with spread;  −A log π, mean over tokens",
        suits="the simplest policy gradient; batches with many tied groups",
        fails="without a ratio, several minibatches move the policy without a bound",
        parts={
            "normalization": "none",
            "rescale_tied": True,
            "clip": "reinforce",
            "aggregation": "token_mean",
        },
    ),
    "topr": Preset(
        title="TOPR",
        paper="Tapered Off-Policy REINFORCE, arXiv 2503.14286",
        formula="A = R − mean R;  −A log π where A ≥ 0, else −sg(min(ρ, 1)) A log π, ρ of the whole sequence against "
        "the behaviour policy, sum over each sequence, mean over all",
        suits="old data, also of other policies",
        fails="good answers keep their full weight however unlikely they have become, as in fine-tuning",
        parts={
            "credit": "trajectory",
            "normalization": "none",
            "ratio": "product",
            "clip": "tapered",
            "proximal": "behavior",
            "correction": "none",
            "aggregation": "sequence_sum",
        },
        differs="the paper's reward is 1 or −1, minus a constant",
    ),
    "asymre": Preset(
        title="AsymRE",
        paper="Asymmetric REINFORCE for off-policy RL, arXiv 2506.20520",
        formula="A = R − (mean R + δ), δ = −0.1;  −A log π, mean over tokens",
        suits="old data without importance weights",
        fails="a shift near 0 lets bad answers of old policies dominate; a large one only imitates good ones",
        parts={
            "normalization": "none",
            "baseline_shift": -0.1,
            "clip": "reinforce",
            "proximal": "behavior",
            "correction": "none",
            "aggregation": "token_mean",
        },
        differs="groups without spread have no advantage here, δ there",
    ),
    "w_reinforce": Preset(
        title="W-REINFORCE",
        paper="The Surprising Effectiveness of Negative Reinforcement, arXiv 2506.01347",
        formula="A = R − ½, times 0.1 where it is above 0;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over tokens",
        suits="pass@k, and entropy that must stay high",
        fails="rewards other than 0 and 1 need another `baseline_shift`; pass@1 rises more slowly",
        parts={
            "baseline": "none",
            "baseline_shift": 0.5,
            "normalization": "none",
            "positive_weight": 0.1,
            "aggregation": "token_mean",
        },
        differs="for rewards of 0 and 1; the paper's are −1 and 1, without a baseline",
    ),
    "pkpo": Preset(
        title="PKPO",
        paper="Pass@K Policy Optimization, arXiv 2505.15201, eq. 33",
        formula="A_i = k · mean over k − 1 others of max(0, R_i − max R_j), k = 4;  "
        "−min(ρA, clip(ρ, 1−ε, 1+ε)A), sum over each sequence, mean over all",
        suits="tasks where the best of k attempts counts",
        fails="with groups of about k few episodes have an advantage; the mean reward rises slowly",
        parts={
            "credit": "trajectory",
            "baseline": "max_at_k",
            "best_of": 4,
            "normalization": "none",
            "aggregation": "sequence_sum",
        },
        differs="k is `best_of`",
    ),
    "clip_cov": Preset(
        title="Clip-Cov",
        paper="The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617",
        formula="as GRPO; loss 0 at a random 2e-4 of the tokens, among those with "
        "1 < (A − mean A)(log π − mean log π) < 5, mean over tokens",
        suits="entropy that falls early in training",
        fails="the share depends on the model: too small does nothing, too large masks what is learned",
        parts={"clip_cov": 2e-4, "aggregation": "token_mean"},
    ),
    "kl_cov": Preset(
        title="KL-Cov",
        paper="The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617",
        formula="A as GRPO;  −ρA, + |log ρ| at the 2e-4 of the tokens with the largest "
        "(A − mean A)(log π − mean log π), mean over tokens",
        suits="entropy that falls early in training",
        fails="the share depends on the model; a large `kl_cov_coef` stops learning",
        parts={"kl_cov": 2e-4, "clip": "none", "aggregation": "token_mean"},
    ),
    "gdpo": Preset(
        title="GDPO",
        paper="Group reward-Decoupled Normalization Policy Optimization, arXiv 2601.05242",
        formula="A = whitened Σ_k w_k (R_k − mean R_k) / std R_k over the names k of rewards;  "
        "−min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over each sequence, then all",
        suits="several rewards of different size or difficulty",
        fails="the small deviation of a nearly constant reward magnifies its noise",
        parts={"credit": "trajectory", "normalization": "per_reward"},
        differs="w is `reward_weights`",
    ),
    "gigpo": Preset(
        title="GiGPO",
        paper="Group-in-Group Policy Optimization, arXiv 2505.10978",
        formula="A = (R − mean R) / std R + ω (R_c − mean R_c) / std R_c, R_c the return from call c on, over the "
        "calls of the group with the same prompt;  −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over each sequence, then all",
        suits="agents whose episodes meet the same states, such as games",
        fails="a prompt with the history is a state of its own: it is GRPO then",
        parts={"credit": "trajectory", "step_weight": 1.0},
        differs="ω is `step_weight`; the paper discounts R_c by 0.95 (`rollout.turn_discount`)",
    ),
}

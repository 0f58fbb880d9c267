"""The verifiers that a config may name without a module."""

from __future__ import annotations

ROOM = "agentrl.rollout.verifiers"
VERIFIERS = {
    "exact": f"{ROOM}.text_match:exact",
    "fuzzy": f"{ROOM}.text_match:fuzzy",
    "choice": f"{ROOM}.text_match:choice",
    "math": f"{ROOM}.math_answer:MathAnswer",
    "regex": f"{ROOM}.format_checks:regex",
    "think_format": f"{ROOM}.format_checks:think_format",
    "json_schema": f"{ROOM}.format_checks:json_schema",
    "code": f"{ROOM}.code_tests:CodeTests",
    "reward_model": f"{ROOM}.trained_reward:TrainedReward",
    "judge": f"{ROOM}.model_judge:ModelJudge",
}
"""Name → `module:function`."""

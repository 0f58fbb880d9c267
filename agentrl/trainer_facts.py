"""Facts that a trainer records at its start: its device, and the values of settings that are `auto`."""

from __future__ import annotations

from agentrl.domain.schemas import Json


def line(facts: Json) -> str:
    """The facts as a line: `8 × NVIDIA H200, computes in bfloat16, 65,536 tokens a microbatch, …`."""
    parts = [
        f"{facts['ranks']} × {facts['device']}",
        f"computes in {facts['dtype']}",
        f"{facts['tokens_per_microbatch']:,} tokens a microbatch",
    ]
    if "checkpoint_every" in facts:
        every = facts["checkpoint_every"]
        steps = "step" if every == 1 else f"{every} steps"
        parts.append("checkpoints by their cost" if every == "auto" else f"a checkpoint every {steps}")
    if "engine_dtype" in facts:
        parts.append(f"engines in {facts['engine_dtype']}")
    return ", ".join(parts)

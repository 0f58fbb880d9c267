"""An SGLang platform plugin that runs unmodified SGLang without an accelerator.

SGLang loads the platform classes of the entry points `sglang.srt.platforms`. This one applies only without a GPU and
without SGLang's own AMX engine.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "agentrl.engine.sglang.cpu.sglang_cpu:CpuPlatform"


def activate() -> str | None:
    """The import path of the platform class; None when torch finds an accelerator."""
    import torch

    if torch.cuda.is_available() or torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return PLATFORM_CLASS

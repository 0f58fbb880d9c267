"""SGLang platform plugin: unmodified SGLang on a machine without an accelerator.

SGLang asks every entry point of the group `sglang.srt.platforms` for a platform class. Ours answers only where nothing
else would: on a GPU machine, or where SGLang's own AMX engine was asked for, SGLang stays as it is.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "agentrl.engine.sglang_cpu:CpuPlatform"


def activate() -> str | None:
    """The import string of our platform class; None where torch sees an accelerator."""
    import torch

    if torch.cuda.is_available() or torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return PLATFORM_CLASS

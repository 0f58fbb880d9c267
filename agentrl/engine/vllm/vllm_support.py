"""The supported releases of vLLM, and its options."""

from __future__ import annotations

from agentrl.engine.checks.supported_releases import Support
from agentrl.engine.engine_client import Capability

_LAUNCHER = "by agentrl engine --backend vllm"

VLLM = Support(
    title="vLLM",
    oldest="0.32.0",
    tested="0.32.0",
    start=f"{_LAUNCHER}, or with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and --logprobs-mode processed_logprobs",
    label=f'start it {_LAUNCHER}, or give it one: POST /update_weight_version {{"new_version": "0"}}',
    temperature=f"with --logprobs-mode processed_logprobs, or {_LAUNCHER}",
    options={
        Capability.WEIGHTS: _LAUNCHER,
        Capability.EARLY_SPANS: _LAUNCHER,
        Capability.FULL_LOGPROBS: _LAUNCHER,
        Capability.DIGESTS: _LAUNCHER,
        Capability.PAUSES: f"with VLLM_SERVER_DEV_MODE=1, or {_LAUNCHER}",
        Capability.ADAPTERS: f"{_LAUNCHER} --lora-rank N",
    },
)

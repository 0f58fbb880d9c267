"""The supported releases of SGLang, and its options."""

from __future__ import annotations

from agentrl.engine.checks.supported_releases import Support
from agentrl.engine.engine_client import Capability

SGLANG = Support(
    title="SGLang",
    oldest="0.5.23",
    tested="0.5.23",
    start="by agentrl engine, or with --weight-version 0 --incremental-streaming-output",
    label="start it with --weight-version 0",
    temperature="without the variable SGLANG_RETURN_ORIGINAL_LOGPROB",
    options={
        Capability.PREPARATION: "by agentrl engine",
        Capability.ADAPTERS: "by agentrl engine --lora-rank N, or with --enable-lora and its options",
        Capability.MEMORY: "on a GPU with --enable-memory-saver, as agentrl train does with resources.colocated",
        Capability.EXPERTS: "by agentrl engine --routed-experts, or with --enable-return-routed-experts",
    },
)

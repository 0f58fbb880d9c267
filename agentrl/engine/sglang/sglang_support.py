"""The supported releases of SGLang, and its options."""

from __future__ import annotations

from agentrl.engine.checks.supported_releases import Support
from agentrl.engine.engine_client import Capability

SGLANG = Support(
    title="SGLang",
    oldest="0.5.23",
    tested="0.5.23",
    start="by agentrl engine, or with --weight-version 0 --incremental-streaming-output",
    label="with --weight-version 0",
    temperature="without the variable SGLANG_RETURN_ORIGINAL_LOGPROB",
    options={
        Capability.PREPARATION: "by agentrl engine",
        Capability.ADAPTERS: "with --enable-lora --max-lora-rank N --lora-target-modules …, or by agentrl engine --lora-rank N",
        Capability.MEMORY: "on a GPU, with --enable-memory-saver (agentrl train does, with resources.colocated)",
        Capability.EXPERTS: "with --enable-return-routed-experts (agentrl engine --routed-experts)",
    },
)

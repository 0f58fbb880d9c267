"""Names with which AReaL's workflows run after a change of their import lines.

    from areal import workflow_context                   ──►  from agentrl.areal import workflow_context
    from areal.api import ModelRequest, RolloutWorkflow  ──►  from agentrl.areal import ModelRequest, RolloutWorkflow

Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging

    from agentrl.areal import stats_tracker
    from agentrl.areal.areal_openai import ArealOpenAI
    from agentrl.areal.dynamic_import import import_from_string
    from agentrl.areal.hf_tokenizers import apply_chat_template, load_hf_tokenizer
    from agentrl.areal.math_verify_worker import get_math_verify_worker
    from agentrl.areal.phase_timing import atrace_session_phase, session_context, trace_session
    from agentrl.rollout.rewards.async_reward import AsyncRewardWrapper
    from agentrl.rollout.workflows import workflow_context
    from agentrl.rollout.workflows.model_io import GenerationHyperparameters, ModelRequest, ModelResponse
    from agentrl.rollout.workflows.rollout_workflow import RolloutWorkflow
    from agentrl.rollout.workflows.session_engine import SessionEngine as InferenceEngine

MODULES = {
    "ArealOpenAI": "agentrl.areal.areal_openai",
    "AsyncRewardWrapper": "agentrl.rollout.rewards.async_reward",
    "GenerationHyperparameters": "agentrl.rollout.workflows.model_io",
    "InferenceEngine": "agentrl.rollout.workflows.session_engine:SessionEngine",
    "ModelRequest": "agentrl.rollout.workflows.model_io",
    "ModelResponse": "agentrl.rollout.workflows.model_io",
    "RolloutWorkflow": "agentrl.rollout.workflows.rollout_workflow",
    "apply_chat_template": "agentrl.areal.hf_tokenizers",
    "atrace_session_phase": "agentrl.areal.phase_timing",
    "get_math_verify_worker": "agentrl.areal.math_verify_worker",
    "import_from_string": "agentrl.areal.dynamic_import",
    "load_hf_tokenizer": "agentrl.areal.hf_tokenizers",
    "logging": "logging:",
    "session_context": "agentrl.areal.phase_timing",
    "stats_tracker": "agentrl.areal.stats_tracker:",
    "trace_session": "agentrl.areal.phase_timing",
    "workflow_context": "agentrl.rollout.workflows.workflow_context:",
}
"""Where each name is defined: `module`, `module:other_name`, or `module:` for the module itself."""

__all__ = [
    "ArealOpenAI",
    "AsyncRewardWrapper",
    "GenerationHyperparameters",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "RolloutWorkflow",
    "apply_chat_template",
    "atrace_session_phase",
    "get_math_verify_worker",
    "import_from_string",
    "load_hf_tokenizer",
    "logging",
    "session_context",
    "stats_tracker",
    "trace_session",
    "workflow_context",
]


def __getattr__(name: str) -> Any:
    """Import a name. Raises AttributeError with the nearest valid name."""
    if name not in MODULES:
        from agentrl.errors import did_you_mean

        hint = "" if name.startswith("_") else did_you_mean(name, MODULES)
        raise AttributeError(f"module 'agentrl.areal' has no attribute {name!r}{hint}")
    module, colon, other = MODULES[name].partition(":")
    found = importlib.import_module(module)
    return found if colon and not other else getattr(found, other or name)

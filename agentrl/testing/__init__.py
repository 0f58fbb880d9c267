"""Test doubles that ship with agentrl: scriptable engines that speak SGLang's and vLLM's HTTP APIs.

from agentrl.testing import FakeEngine, FakeVLLM, Reply
"""

from agentrl.testing.fake_engine import FakeEngine
from agentrl.testing.fake_vllm import FakeVLLM
from agentrl.testing.replies import END_OF_TURN, Omission, Reply, fixed_answer, spans_of

__all__ = ["END_OF_TURN", "FakeEngine", "FakeVLLM", "Omission", "Reply", "fixed_answer", "spans_of"]

"""Test doubles that ship with agentrl: a scriptable engine that speaks SGLang's HTTP API.

from agentrl.testing import FakeEngine, Reply
"""

from agentrl.testing.fake_engine import FakeEngine
from agentrl.testing.replies import END_OF_TURN, Omission, Reply, fixed_answer, spans_of

__all__ = ["END_OF_TURN", "FakeEngine", "Omission", "Reply", "fixed_answer", "spans_of"]

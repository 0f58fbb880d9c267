"""Conditions for the recorded calls of the policy, and for calls that asked to be left out of training."""

from __future__ import annotations

from agentrl.domain.schemas import InteractionStatus, Role
from agentrl.store.tables import interactions

OF_THE_POLICY = (interactions.c.status == InteractionStatus.COMPLETE, interactions.c.role != Role.UPSTREAM)
"""Delivered calls that the policy answered: the nodes of token trees."""
STORE = "store"
"""The option that is false for a call that asked to be left out of training and of AReaL's exports."""

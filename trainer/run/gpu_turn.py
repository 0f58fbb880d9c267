"""The trainer's turns on GPUs that it shares with the run's engines, which release their memory meanwhile.

    take ─► engines release their memory ─► step, checkpoint ─► give ─► publish: engines load the version
              └──────── the lease is renewed ──────────────────┘

The store ends a lease by its own clock, and engines take the memory back: so a killed trainer needs no farewell.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run.lease_renewal import LEASE_S, Renewal
from agentrl.trainer.run.proxy_requests import ask
from agentrl.trainer.run.trainer_state import Trainer


def take(t: Trainer) -> bool:
    """Wait until no engine has GPU memory; false when told to stop first. Collective."""
    if not t.config.resources.takes_turns:
        return True
    start = time.time()

    def request(publisher: Publisher, waits: Callable[[], None]) -> bool:
        while publisher.release_engines(t.lineage.epoch, LEASE_S, waits):
            now = time.monotonic()
            if t.lineage.renew_memory_lease(LEASE_S):  # the answer may have come late
                t.renewal = Renewal(lambda: t.lineage.renew_memory_lease(LEASE_S), now)
                return True
        return False

    taken = ask(t, request)
    t.lineage.record("wait_for_engines", start, time.time(), step=t.step + 1)
    return taken


def give(t: Trainer) -> None:
    """Free the GPU memory that the step needed, on every rank, and stop renewing the lease. Collective.

    The engines may have the memory now. The publish, or `reload`, ends the lease.
    """
    if t.config.resources.takes_turns:
        if t.world.device.type == "cuda":
            torch.cuda.empty_cache()
        t.world.barrier()
        stop(t)


def reload(t: Trainer) -> bool:
    """End the lease, so that engines serve the run's version; false when told to stop first. Collective."""
    if not t.config.resources.takes_turns:
        return True
    return ask(t, lambda publisher, waits: publisher.reload_engines(t.lineage.epoch, waits))


def stop(t: Trainer) -> None:
    """Stop renewing the lease, if this rank does."""
    if t.renewal is not None:
        t.renewal.stop()
        t.renewal = None

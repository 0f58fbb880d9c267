"""Brings the engines to a new weight version, after its evaluation where `evaluation.hold` is set."""

from __future__ import annotations

import time
from functools import partial

from agentrl.trainer.publish.offers import Offers
from agentrl.trainer.run import gpu_turn
from agentrl.trainer.run.proxy_requests import ask
from agentrl.trainer.run.trainer_state import Trainer
from agentrl.trainer.weights.published import Published

POLL_S = 1.0


def publish(t: Trainer, version: int, made: Published | None) -> None:
    """Bring the engines to `version`. When stopped first, the next start republishes it.

    `made` has its facts where the policy has this version now: its tensors can then be sent directly. It ends the
    trainer's turn on the engines' GPUs. Collective.
    """
    start = time.time()
    if not wait_for_evaluation(t, version):
        return
    begun = time.time()
    offers = None
    if made is not None and made.size_bytes and t.config.publish.transport != "disk":
        offers = Offers(t.world, partial(t.writer.stream, dict(t.policy.trainable())))
    done = ask(t, lambda publisher, waits: publisher.publish(version, t.lineage.epoch, made, offers, waits), offers)
    t.publish_s = time.time() - start
    if done:
        t.lineage.record("wait_for_publish", begun, time.time(), version=version)


def wait_for_evaluation(t: Trainer, version: int) -> bool:
    """Wait until `version` may be published; false when told to stop first. Collective.

    The step is durable already. No lock is taken, so a trainer that was killed while it waited waits again after its
    resume. The wait ends after `evaluation.hold_timeout_s`; the evaluation then records which versions sampled it.
    """
    if not t.config.evaluation.hold:
        return True
    start, held, stopping = time.time(), True, False
    if t.world.share(t.lineage.is_held(version)):  # the engines have to sample the evaluation
        stopping = not gpu_turn.reload(t)
    while held and not stopping:
        in_time = time.time() - start < t.config.evaluation.hold_timeout_s
        held = in_time and t.lineage.is_held(version)
        stopping = held and (t.stop.wait(POLL_S) or t.lineage.is_stopping())
        held, stopping = t.world.share((held, stopping))
    t.lineage.record("wait_for_evaluation", start, time.time(), version=version)
    return not stopping

"""Asks the proxy to bring its engines to a weight version, and tries again until it does.

With a transport other than `disk`, the first attempt offers the version's tensors to the engines that answer. An engine
that cannot receive them reads the version's folder. Later attempts use folders alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import httpx
import torch
from torch import Tensor

from agentrl.configs.publish_config import PublishConfig
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError, FencedError
from agentrl.trainer.publish.tensor_broadcast import broadcast
from agentrl.trainer.publish.tensor_buckets import Buckets, digests, in_buckets
from agentrl.trainer.publish.tensor_sharing import NoRoom, shared

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
REQUEST_TIMEOUT_S = 600.0
RETRIED = {429, 502, 503, 504}


class Publishes(Protocol):
    """Brings engines to weight versions: a `Publisher` on rank 0, `NoPublisher` on the others."""

    def publish(
        self, version: int, epoch: int, tensors: Mapping[str, Tensor], waits: Callable[[], None] = lambda: None
    ) -> bool:
        """True once every serving engine has `version`; false when stopped first."""


class NoPublisher:
    """The publisher of ranks other than 0, which publish nothing."""

    def publish(
        self, version: int, epoch: int, tensors: Mapping[str, Tensor], waits: Callable[[], None] = lambda: None
    ) -> bool:
        """Nothing was published."""
        return False


@dataclass(frozen=True, slots=True)
class Publisher:
    """Calls `POST /admin/publish`. `pause(seconds)` waits, and returns true when the publisher should give up."""

    url: str
    admin_key: str
    pause: Callable[[float], bool]
    say: Callable[[str], None] = print
    config: PublishConfig = field(default_factory=PublishConfig)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compares: torch.dtype | None = None  # the engines' type, where their digests can be compared

    def publish(
        self, version: int, epoch: int, tensors: Mapping[str, Tensor], waits: Callable[[], None] = lambda: None
    ) -> bool:
        """True once every serving engine has `version`; false when stopped first. Publishing twice is harmless.

        `tensors` are the version's, by the names of the base model's files; empty where they are in the folder only.
        Calls `waits` after each attempt that failed. An attempt takes at most REQUEST_TIMEOUT_S.

        Raises FencedError when a trainer newer than `epoch` has started, AgentRLError when the proxy refuses.
        """
        pause_s = FIRST_PAUSE_S
        reported = False
        body: Json = {"version": version, "epoch": epoch, "bytes": sum(t.nbytes for t in tensors.values()) or None}
        if self.compares and self.config.verify:
            body["digests"] = digests(tensors, self.compares)
        offer = in_buckets(tensors, self.config.bucket_bytes) if self.config.transport != "disk" else []
        with httpx.Client(timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=5.0), trust_env=False) as http:
            while True:
                problem = self._try(http, body, offer)
                if problem is None:
                    return True
                offer = []
                if not reported:
                    self.say(f"publishing version {version}: {problem}; trying again until it works")
                    reported = True
                waits()
                if self.pause(pause_s):
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _try(self, http: httpx.Client, body: Json, offer: Buckets) -> str | None:
        """None after success, else why to try again. Raises when another try cannot help."""
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        version, epoch = body["version"], body["epoch"]
        try:
            with self._offered(http, headers, offer) as transfer:
                answer = http.post(f"{self.url}/admin/publish", json={**body, "transfer": transfer}, headers=headers)
        except NoRoom as error:
            return str(error)
        except httpx.TransportError as error:
            return f"the proxy at {self.url} does not answer ({type(error).__name__})"
        if answer.is_success:
            return None
        reason = f"the proxy answered {answer.status_code}: {answer.text[:300]}"
        if answer.status_code in RETRIED:
            return reason
        if "epoch_over" in answer.text:
            raise FencedError(f"trainer epoch {epoch} is over: version {version} is not published")
        raise AgentRLError(f"version {version} cannot be published: {reason}")

    @contextmanager
    def _offered(self, http: httpx.Client, headers: dict[str, str], offer: Buckets) -> Iterator[Json | None]:
        """How engines get the tensors while the block runs; None means from the folder."""
        if not offer:
            yield None
            return
        asked = http.get(f"{self.url}/admin/publish/members", headers=headers)
        members = asked.json() if asked.is_success else []
        if not members:
            yield None
        elif self.config.transport == "tensor":
            with shared(offer, members, timeout_s=self.config.timeout_s) as transfer:
                yield transfer
        else:
            with broadcast(offer, members, device=self.device, timeout_s=self.config.timeout_s) as transfer:
                yield transfer

"""Asks the proxy to bring its engines to a weight version, or to release their GPU memory, until it does.

With a transport other than `disk`, the first attempt offers the version's tensors to the engines that answer. An engine
that cannot receive them reads the version's folder. Later attempts use folders alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import assert_never

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


class _Refused(Exception):
    """The proxy refused a request for good."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """Calls `POST /admin/publish`, `/api/engines/release` and `/api/engines/reload`.

    `pause(seconds)` waits, and returns true when the publisher should give up.
    """

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

        `tensors` are those of the version, by the names of the base model's files; empty if only the folder has them.
        Calls `waits` after each attempt that failed. An attempt takes at most REQUEST_TIMEOUT_S.

        Raises FencedError when a trainer newer than `epoch` has started, AgentRLError when the proxy refuses.
        """
        body: Json = {"version": version, "epoch": epoch, "bytes": sum(t.nbytes for t in tensors.values()) or None}
        if self.compares and self.config.verify:
            body["digests"] = digests(tensors, self.compares)
        offers = [in_buckets(tensors, self.config.bucket_bytes)] if self.config.transport != "disk" else []

        def attempt(http: httpx.Client) -> str | None:
            with self._offered(http, offers.pop() if offers else []) as transfer:
                return self._post(http, "/admin/publish", {**body, "transfer": transfer})

        return self._until_done(f"publishing version {version}", attempt, waits)

    def release_engines(self, epoch: int, lease_s: float, waits: Callable[[], None] = lambda: None) -> bool:
        """True once no engine has GPU memory, for `lease_s` since the last attempt; false when stopped first.

        Calls `waits` and raises as `publish` does.
        """
        body: Json = {"epoch": epoch, "lease_s": lease_s}
        what = "taking the GPUs from the engines"
        return self._until_done(what, lambda http: self._post(http, "/api/engines/release", body), waits)

    def reload_engines(self, epoch: int, waits: Callable[[], None] = lambda: None) -> bool:
        """True once engines may take their GPU memory back, with the run's version; false when stopped first.

        Calls `waits` and raises as `publish` does.
        """
        body: Json = {"epoch": epoch}
        what = "giving the GPUs back to the engines"
        return self._until_done(what, lambda http: self._post(http, "/api/engines/reload", body), waits)

    def _until_done(self, what: str, attempt: Callable[[httpx.Client], str | None], waits: Callable[[], None]) -> bool:
        """Repeat `attempt`, which returns the reason to try again or None; false when stopped first.

        `attempt` raises AgentRLError when another try cannot help.
        """
        pause_s = FIRST_PAUSE_S
        reported = False
        with httpx.Client(timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=5.0), trust_env=False) as http:
            while True:
                try:
                    problem = attempt(http)
                except NoRoom as error:
                    problem = str(error)
                except httpx.TransportError as error:
                    problem = f"the proxy at {self.url} does not answer ({type(error).__name__})"
                except _Refused as error:
                    raise AgentRLError(f"{what} failed: {error}") from error
                if problem is None:
                    return True
                if not reported:
                    self.say(f"{what}: {problem}; trying again until it works")
                    reported = True
                waits()
                if self.pause(pause_s):
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _post(self, http: httpx.Client, path: str, body: Json) -> str | None:
        """Send one request; returns None after success, else the reason to try again.

        Raises _Refused when another try cannot help, FencedError when a newer trainer has started.
        """
        answer = http.post(f"{self.url}{path}", json=body, headers=self._headers)
        if answer.is_success:
            return None
        reason = f"the proxy answered {answer.status_code}: {answer.text[:300]}"
        if answer.status_code in RETRIED:
            return reason
        if "epoch_over" in answer.text:
            raise FencedError(f"trainer epoch {body['epoch']} is over: a newer trainer has started")
        raise _Refused(reason)

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.admin_key}"}

    @contextmanager
    def _offered(self, http: httpx.Client, offer: Buckets) -> Iterator[Json | None]:
        """How engines get the tensors while the block runs; None means from the folder."""
        if not offer:
            yield None
            return
        asked = http.get(f"{self.url}/admin/publish/members", headers=self._headers)
        members = asked.json() if asked.is_success else []
        timeout_s, transport = self.config.timeout_s, self.config.transport
        if not members or transport == "disk":
            yield None
        elif transport == "tensor":
            with shared(offer, members, timeout_s=timeout_s) as transfer:
                yield transfer
        elif transport == "distributed":
            with broadcast(offer, members, device=self.device, timeout_s=timeout_s) as transfer:
                yield transfer
        else:
            assert_never(transport)

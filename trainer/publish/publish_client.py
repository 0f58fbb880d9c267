"""Asks the proxy to bring its engines to a weight version, or to release their GPU memory, until it does.

With a transport other than `disk`, the first attempt offers the version's tensors to the engines that answer. An engine
that cannot receive them reads the version's folder. Later attempts use folders alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

import httpx
import torch

from agentrl.configs.publish_config import PublishConfig
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError, FencedError
from agentrl.trainer.publish.engine_handles import NoHandles, new_group
from agentrl.trainer.publish.offers import Offers
from agentrl.trainer.publish.tensor_sharing import NoRoom
from agentrl.trainer.publish.version_upload import UploadRefused, upload
from agentrl.trainer.weights.published import Published

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
REQUEST_TIMEOUT_S = 600.0
MEMBERS_TIMEOUT_S = 30.0
RETRIED = {429, 502, 503, 504}
UPLOADS_RETRIED = {409, 507}
"""A file arrived damaged; the proxy's disk is full."""


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

    def publish(
        self,
        version: int,
        epoch: int,
        made: Published | None = None,
        offers: Offers | None = None,
        waits: Callable[[], None] = lambda: None,
    ) -> bool:
        """True once every serving engine has `version`; false when stopped first. Publishing twice is harmless.

        `made` has the facts of the version, where they are known. `offers` brings its tensors to engines that receive
        them directly. Calls `waits` after each attempt that failed. An attempt takes at most REQUEST_TIMEOUT_S.

        Raises FencedError when a trainer newer than `epoch` has started, AgentRLError when the proxy refuses.
        """
        body: Json = {"version": version, "epoch": epoch, "bytes": (made.size_bytes if made else 0) or None}
        if made and made.digests:
            body["digests"] = dict(made.digests)
        first = [offers] if offers is not None and self.config.transport != "disk" else []

        def attempt(http: httpx.Client) -> str | None:
            if made is not None and (problem := self._upload(http, made.path)) is not None:
                return problem
            with self._offered(http, first.pop() if first else None, made) as transfer:
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
        with self._client(REQUEST_TIMEOUT_S) as http:
            while True:
                try:
                    problem = attempt(http)
                except (NoRoom, NoHandles) as error:
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
        answer = http.post(f"{self.url}{path}", json=body)
        if answer.is_success:
            return None
        reason = f"the proxy answered {answer.status_code}: {answer.text[:300]}"
        if answer.status_code in RETRIED:
            return reason
        if "epoch_over" in answer.text:
            raise FencedError(f"trainer epoch {body['epoch']} is over: a newer trainer has started")
        raise _Refused(reason)

    def _upload(self, http: httpx.Client, folder: Path) -> str | None:
        """Send a version to a proxy that does not see its folder; returns the reason to try again, if any.

        Raises _Refused when another try cannot help.
        """
        try:
            upload(http, self.url, folder)
        except UploadRefused as error:
            if error.status not in RETRIED | UPLOADS_RETRIED:
                raise _Refused(str(error)) from error
            return str(error)
        return None

    def _client(self, timeout_s: float) -> httpx.Client:
        timeout = httpx.Timeout(timeout_s, connect=5.0)
        return httpx.Client(headers={"Authorization": f"Bearer {self.admin_key}"}, timeout=timeout, trust_env=False)

    @contextmanager
    def _offered(self, http: httpx.Client, offers: Offers | None, made: Published | None) -> Iterator[Json | None]:
        """How engines get the tensors while the block runs; None means from the folder."""
        members = self._members(http) if offers is not None else []
        timeout_s, transport = self.config.timeout_s, self.config.transport
        if offers is None or not members or transport == "disk":
            yield None
        elif transport == "tensor":
            with offers.shared(members, timeout_s) as transfer:
                yield transfer
        elif transport == "distributed":
            with offers.broadcast(members, self.device, timeout_s) as transfer:
                yield transfer
        elif transport == "checkpoint_engine":
            if made is None or not made.whole:
                yield None
                return
            group = new_group(offers.ranks, self.config.bucket_bytes, self.config.update_timeout_s)
            with offers.handed(made.path, members, group) as transfer:
                yield transfer
        else:
            assert_never(transport)

    def prepares(self) -> bool:
        """Whether the run has engines that answer, and all of them can prepare a version while they serve another."""
        with self._client(MEMBERS_TIMEOUT_S) as http:
            try:
                members = self._members(http)
            except httpx.TransportError:
                return False
        return bool(members) and all(member.get("prepares") for member in members)

    def _members(self, http: httpx.Client) -> list[Json]:
        """The engines that answer: `url`, `ranks`, `prepares`."""
        asked = http.get(f"{self.url}/admin/publish/members")
        return list(asked.json()) if asked.is_success else []

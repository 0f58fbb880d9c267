"""Ask the proxy to bring its engines to a weight version, however long the proxy takes to come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httpx

from agentrl.errors import AgentRLError, FencedError

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
REQUEST_TIMEOUT_S = 600.0
RETRIED = {429, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Publisher:
    """`POST /admin/publish`. `pause(seconds)` waits, and returns true when waiting should end for good."""

    url: str
    admin_key: str
    pause: Callable[[float], bool]
    say: Callable[[str], None] = print

    def publish(self, version: int, epoch: int) -> bool:
        """True once every serving engine has `version`; false when stopped first. Publishing twice is harmless.

        Raises FencedError when a trainer newer than `epoch` has started, AgentRLError when the proxy refuses.
        """
        pause_s = FIRST_PAUSE_S
        told = False
        with httpx.Client(timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=5.0), trust_env=False) as http:
            while True:
                problem = self._try(http, version, epoch)
                if problem is None:
                    return True
                if not told:
                    self.say(f"publishing version {version}: {problem}; trying again until it works")
                    told = True
                if self.pause(pause_s):
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _try(self, http: httpx.Client, version: int, epoch: int) -> str | None:
        """None, or why it is worth another try."""
        try:
            answer = http.post(
                f"{self.url}/admin/publish",
                json={"version": version, "epoch": epoch},
                headers={"Authorization": f"Bearer {self.admin_key}"},
            )
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

"""Version spans in every event. vLLM's API process knows the version of each token as it comes, and sends the spans
with an answer's last event alone.
"""

from __future__ import annotations

from typing import Any


def send_with_every_event(state: Any) -> None:
    """Let `state`, vLLM's class of a request's state, give the spans of all tokens so far with each output."""
    last_only = state._new_completion_output

    def new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = last_only(self, *args, **kwargs)
        output.weight_versions = self._weight_version_spans()
        return output

    state._new_completion_output = new_completion_output

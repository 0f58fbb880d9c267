"""The members that Chat Completions and Completions share: errors, statuses, and answers of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from agentrl.errors import RequestError
from agentrl.proxy.dialects.openai.chat_output import error_body
from agentrl.proxy.dialects.openai.upstream_chunks import read_chunk
from agentrl.proxy.dialects.upstream_event import UpstreamEvent


class OpenAIDialect:
    """A dialect whose answers have `choices`."""

    parameter_names: ClassVar[Mapping[str, str]]
    """The dialect's names of parameters in errors."""

    def encode_error(self, error: RequestError) -> bytes:
        """An error in OpenAI's shape."""
        return orjson.dumps(error_body(error, self.parameter_names))

    def read_upstream(self, data: Any) -> UpstreamEvent:
        """An answer of another server, or one of its events."""
        return read_chunk(data)

    def status(self, error: RequestError) -> int:
        """The error's own status."""
        return error.status

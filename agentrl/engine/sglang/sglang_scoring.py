"""Scores given tokens by an SGLang server: `POST /generate` that samples nothing.

SGLang's logprobs of prompt tokens are those at temperature 1, whatever temperature a request has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.domain.schemas import Float32, Int32, Json
from agentrl.engine.control.control_requests import ControlRequests
from agentrl.errors import EngineError


@dataclass(frozen=True, slots=True)
class Scored:
    """What a server says of the tokens from `start` on: their logprobs, and their texts where these were asked for."""

    logprobs: Float32  # (T − start,)
    texts: list[str] | None


class SGLangScoring(ControlRequests):
    """Asks one server. `http` belongs to the caller and may be shared."""

    async def model_path(self, timeout_s: float) -> str:
        """The model that the server says it serves."""
        path = (await self._call("GET", "/model_info", timeout_s=timeout_s)).get("model_path")
        if not isinstance(path, str):
            raise EngineError(f"{self.url}/model_info does not answer as SGLang")
        return path

    async def score(
        self, input_ids: Sequence[int] | Int32, start: int, timeout_s: float, *, texts: bool = False
    ) -> Scored:
        """The logprob of each token from position `start` on, at least 1, given all before it.

        Raises EngineError when the server answers with other tokens, or without logprobs, EngineRejected for a request
        that it refuses, EngineUnavailable without an answer.
        """
        assert start >= 1, "the first token has no context"
        ids = [int(token) for token in input_ids]
        body: Json = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "return_text_in_logprobs": texts,
            "stream": False,
        }
        answer = await self._call("POST", "/generate", body, timeout_s)
        meta = answer.get("meta_info")
        rows = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
        if not isinstance(rows, list) or len(rows) != len(ids) - start + 1:
            count = len(rows) if isinstance(rows, list) else "no"
            raise EngineError(
                f"{self.url}/generate gave {count} logprobs of {len(ids) - start + 1} prompt tokens; does it answer as "
                "SGLang?"
            )
        return self._read(rows[1:], ids[start:], texts)  # the first one has no logprob: its context was not computed

    def _read(self, rows: list[object], ids: Sequence[int], texts: bool) -> Scored:
        logprobs, words = np.empty(len(ids), np.float32), list[str]()
        for i, (row, token) in enumerate(zip(rows, ids, strict=True)):
            match row:
                case [float() | int() as logprob, int() as echoed, *rest] if abs(logprob) <= LARGEST_FLOAT32:
                    pass
                case _:
                    raise EngineError(f"{self.url}/generate gave {row!r:.100} as the logprob of token {token}")
            if echoed not in (token, NO_TEXT):
                raise EngineError(
                    f"{self.url}/generate scored token {echoed} in place of {token}: it has another tokenizer"
                )
            logprobs[i] = logprob
            words.append(rest[0] if rest and isinstance(rest[0], str) else "")
        return Scored(logprobs, words if texts else None)


LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""A larger number would become infinite as a float32."""
NO_TEXT = 0
"""SGLang answers this id for the last id of its vocabulary, whose text it does not look up."""

"""Reading an engine's events: increments or everything so far, and everything that must not pass."""

from __future__ import annotations

import base64
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine import chunks
from agentrl.engine.chunks import Adapter, parse_version
from agentrl.engine.event_buffer import EventBuffer
from agentrl.engine.sglang.sglang_events import ChunkReader
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable


def event(ids: list[int], total: int, **meta: Any) -> Json:
    return {
        "output_ids": ids,
        "meta_info": {
            "output_token_logprobs": [[-i / 4, i, None] for i in ids],
            "completion_tokens": total,
            "finish_reason": None,
            "weight_version": "3",
        }
        | meta,
    }


LAST = {"finish_reason": {"type": "stop", "matched": 8}}


@pytest.mark.parametrize("cumulative", [False, True])
def test_both_styles_of_streaming_give_the_same_chunks(cumulative: bool) -> None:
    reader, parts, so_far, got = ChunkReader(), [[4], [5, 6], [], [8]], [], []
    for part in parts:
        so_far += part
        chunk = reader.read(event(list(so_far) if cumulative else part, len(so_far)))
        got.append(chunk.output_ids)
        assert chunk.logprobs == [-i / 4 for i in part]
        assert chunk.version_label == 3
    assert got == parts


def test_the_last_chunk_carries_reason_and_spans() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    chunk = ChunkReader().read(event([7, 8], 2, weight_versions=spans, **LAST))
    assert (chunk.finish_reason, chunk.matched_stop) == ("stop", 8)
    assert chunk.versions == [VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)]


def test_tokens_of_an_adapter_have_its_version_whatever_the_base_is_labelled() -> None:
    reader = ChunkReader(Adapter("v5-a", 5))
    first = reader.read(event([7], 1, weight_version="0"))
    assert (first.version_label, first.versions) == (5, None)
    spans = [{"version": "0", "start": 0, "end": 2}]
    last = reader.read(event([8], 2, weight_version="0", weight_versions=spans, **LAST))
    assert (last.version_label, last.versions) == (5, [VersionSpan(version=5, start=0, end=2)])


@pytest.mark.parametrize(
    "meta",
    [
        {"weight_version": "3"},
        LAST | {"weight_version": "0", "weight_versions": [{"version": "3", "start": 0, "end": 2}]},
    ],
)
def test_an_adapter_over_other_weights_than_the_base_is_an_error(meta: Json) -> None:
    with pytest.raises(EngineUnavailable, match="version 3 instead of the base weights"):
        ChunkReader(Adapter("v5-a", 5)).read(event([7, 8], 2, **meta))


def test_a_request_that_was_aborted_before_its_first_token_has_no_spans() -> None:
    assert ChunkReader().read(event([], 0, finish_reason={"type": "abort"})).versions == []


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (LAST, "no weight_versions"),
        (LAST | {"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "do not cover"),
        (LAST | {"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "is not a number"),
        ({"finish_reason": {"type": "tired"}}, "unknown finish reason"),
        ({"output_token_logprobs": [[-1.0, 9, None], [-1.0, 8, None]]}, "other tokens"),
        ({"output_token_logprobs": [[-1.0, 7, None]]}, "1 tokens, expected 2"),
        ({"completion_tokens": 5}, "2 tokens, expected 5"),
        ({"weight_version": "default"}, "label it 0"),
    ],
)
def test_a_chunk_that_cannot_be_recorded_is_an_error(meta: Json, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ChunkReader().read(event([7, 8], 2, **meta))


@pytest.mark.parametrize("name", ["output_ids", "meta_info"])
def test_missing_parts_are_named(name: str) -> None:
    broken = event([7], 1)
    del broken[name]
    with pytest.raises(EngineError, match=name):
        ChunkReader().read(broken)


def test_errors_inside_the_stream_are_told_apart() -> None:
    with pytest.raises(EngineRejected, match="too long"):
        ChunkReader().read({"error": {"message": "too long", "code": 400}})
    with pytest.raises(EngineRejected, match="bad grammar"):
        ChunkReader().read(event([], 0, finish_reason={"type": "abort", "message": "bad grammar", "status_code": 400}))
    refusal = {"type": "abort", "message": "no such type", "status_code": 400}
    with pytest.raises(EngineRejected, match="no such type"):  # SGLang sends a token without a logprob beside it
        ChunkReader().read(event([7], 1, finish_reason=refusal, output_token_logprobs=[]))
    with pytest.raises(EngineError) as caught:
        ChunkReader().read({"error": {"message": "boom", "code": 500}})
    assert not isinstance(caught.value, EngineRejected)


@pytest.mark.parametrize(("read", "new"), [([3, 4], [7, 8]), ([3], [7]), ([], [7, 8]), ([3, 4], [4, 4])])
def test_the_end_of_an_aborted_request_echoes_it(read: list[int], new: list[int]) -> None:
    """What was not yet sent when it was aborted comes in one event with the echo: the last id, all logprobs."""
    reader, total = ChunkReader(), len(read) + len(new)
    reader.read(event(read, len(read)))
    triples: list[Any] = [[-i / 4, i, None] for i in [*new, *read, *new]]
    versions = [{"version": "0", "start": 0, "end": total}]
    end = {"finish_reason": {"type": "abort"}, "output_token_logprobs": triples, "weight_versions": versions}
    end["output_top_logprobs"] = [[triple] for triple in triples]
    chunk = reader.read(event([*new, new[-1]], total, **end))
    assert (chunk.output_ids, chunk.logprobs) == (new, [-i / 4 for i in new])
    assert chunk.top_logprobs == [[(-i / 4, i)] for i in new]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_events_survive_every_cut_of_the_bytes(size: int) -> None:
    raw = b'data: {"a": 1}\n\n: comment\n\nevent: x\ndata: two\n\ndata: [DONE]\n\ndata: unfinished'
    buffer = EventBuffer()
    pieces = (raw[start : start + size] for start in range(0, len(raw), size))
    assert [data for piece in pieces for data in buffer.feed(piece)] == [b'{"a": 1}', b"two", b"[DONE]"]


@pytest.mark.parametrize("label", ["default", "", "-1", "1.5"])
def test_versions_are_numbers(label: str) -> None:
    with pytest.raises(EngineError):
        parse_version(label)
    assert parse_version("12") == 12


@given(st.binary(max_size=2000))
def test_experts_are_decoded_in_pieces(raw: bytes) -> None:
    with patch.object(chunks, "PIECE", 8):
        assert chunks.unpacked_experts(base64.b64encode(raw).decode()) == raw


@pytest.mark.parametrize("sent", ["abc", "ab=c", "ä" * 4, "YQ==YQ==", 5])
def test_experts_that_are_no_base64_are_refused(sent: Any) -> None:
    with pytest.raises(EngineError, match="not base64"):
        chunks.unpacked_experts(sent)

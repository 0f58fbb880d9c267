"""Reading vLLM's events, and everything that must not pass."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.chunks import Adapter
from agentrl.engine.vllm.vllm_events import AnswerReader
from agentrl.errors import EngineDied, EngineError, EngineRejected, EngineUnavailable


def spans(*found: tuple[str, int, int]) -> list[Json]:
    return [{"version": version, "start": start, "end": end} for version, start, end in found]


def event(ids: list[int], **choice: Any) -> Json:
    content = [{"token_id": i, "logprob": -i / 4, "rank": 1, "top_logprobs": [entry(i, -i / 4, 1)]} for i in ids]
    whole = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": None, "weight_versions": None}
    return {"choices": [whole | choice]}


def entry(token: int, logprob: float, rank: int | None) -> Json:
    return {"token_id": token, "logprob": logprob, "rank": rank}


USAGE: Json = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}}


def test_the_last_chunk_waits_for_the_usage() -> None:
    reader = AnswerReader()
    first = reader.read(event([4, 5], weight_versions=spans(("3", 0, 2))))
    assert first is not None
    assert (first.output_ids, first.logprobs, first.version_label) == ([4, 5], [-1.0, -1.25], 3)
    last = event([8], finish_reason="stop", stop_reason=8, weight_versions=spans(("3", 0, 1), ("4", 1, 3)))
    assert reader.read(last) is None
    chunk = reader.read(USAGE)
    assert chunk is not None
    assert (chunk.finish_reason, chunk.matched_stop, chunk.cached_tokens, chunk.version_label) == ("stop", 8, 16, 4)
    assert chunk.versions == [VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=3)]
    assert reader.end() is None


def test_a_stream_without_usage_has_its_last_chunk_at_the_end() -> None:
    reader = AnswerReader()
    assert reader.read(event([], finish_reason="abort", weight_versions=[])) is None
    chunk = reader.end()
    assert chunk is not None
    assert (chunk.finish_reason, chunk.versions, chunk.version_label) == ("abort", [], None)


def test_the_models_own_end_token_is_named() -> None:
    reader = AnswerReader()
    reader.read(event([2], finish_reason="stop", weight_versions=spans(("0", 0, 1))))
    chunk = reader.end()
    assert chunk is not None
    assert chunk.matched_stop == 2


def test_an_unlabelled_part_of_an_answer_has_no_version_yet() -> None:
    chunk = AnswerReader().read(event([7]))
    assert chunk is not None
    assert (chunk.versions, chunk.version_label) == (None, None)


def test_tokens_of_an_adapter_have_its_version_on_base_weights_only() -> None:
    chunk = AnswerReader(Adapter("v5-a", 5)).read(event([7], weight_versions=spans(("0", 0, 1))))
    assert chunk is not None
    assert chunk.versions == [VersionSpan(version=5, start=0, end=1)]
    with pytest.raises(EngineUnavailable, match="serves version 3"):
        AnswerReader(Adapter("v5-a", 5)).read(event([7], weight_versions=spans(("3", 0, 1))))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry(9, -0.5, 1), entry(4, -1, 2), entry(5, -2, 3)], [(-0.5, 9), (-1, 4)]),
        ([entry(9, -5, 40), entry(4, -1, 1), entry(5, -2, 2)], [(-1, 4), (-2, 5)]),
        ([entry(9, -5, 3), entry(4, -1, 1), entry(5, -2, 2)], [(-1, 4), (-2, 5)]),
    ],
)
def test_the_sampled_token_is_among_the_likeliest_only_if_it_is(
    entries: list[Json], expected: list[tuple[float, int]]
) -> None:
    answer = event([9])
    answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = entries
    chunk = AnswerReader().read(answer)
    assert chunk is not None
    assert chunk.top_logprobs == [expected]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (event([7], finish_reason="stop"), EngineError, "no weight_versions"),
        (event([7], weight_versions=spans(("0", 0, 2))), EngineError, "do not cover"),
        (event([7], weight_versions=spans(("default", 0, 1))), EngineUnavailable, "'default' is not a number"),
        (event([7], finish_reason="error"), EngineError, "finish reason 'error'"),
        (event([7], logprobs=None), EngineError, "lacks"),
        ({"choices": [{"token_ids": [7]}]}, EngineError, "lacks 'logprobs'"),
        (event([7]) | {"error": {"message": "too long", "code": 400}}, EngineRejected, "too long"),
        ({"error": {"message": "out of memory", "code": 500}}, EngineError, "out of memory"),
        ({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, EngineDied, "core has died"),
    ],
)
def test_what_cannot_be_recorded_is_an_error(answer: Json, kind: type[EngineError], said: str) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        AnswerReader().read(answer)
    assert type(caught.value) is kind


def test_a_token_without_a_logprob_is_an_error_and_with_a_grammar_a_refusal() -> None:
    answer = event([7])
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    with pytest.raises(EngineError, match="without a logprob"):
        AnswerReader().read(answer)
    failed: Json = {"error": {"message": "Internal server error", "code": 500}}
    for event_of_it in (answer, failed):
        with pytest.raises(EngineRejected, match="grammar accepts no further token"):
            AnswerReader(bound=True).read(event_of_it)
    with pytest.raises(EngineError, match="Internal server error") as caught:
        AnswerReader().read(failed)
    assert type(caught.value) is EngineError


@pytest.mark.parametrize("bound", [True, False])
def test_a_refusal_says_what_was_refused(bound: bool) -> None:
    reader = AnswerReader(bound=bound)
    with pytest.raises(EngineRejected, match="longer than"):
        reader.read({"error": {"message": "This model's maximum context length is 8 tokens.", "code": 400}})
    with pytest.raises(EngineRejected, match="its grammar was refused" if bound else "Invalid"):
        reader.read({"error": {"message": "Invalid regex", "code": 400}})

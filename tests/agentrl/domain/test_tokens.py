from __future__ import annotations

import hashlib
import struct
from itertools import chain, pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.tokens import TokenIds, packed, unpacked

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=12)
PARTS = st.lists(IDS, max_size=6)


def grown(parts: list[list[int]]) -> TokenIds:
    ids = TokenIds()
    for part in parts:
        ids = ids.extended(part)
    return ids


@given(PARTS)
def test_token_ids_read_as_the_list_of_all_parts(parts: list[list[int]]) -> None:
    ids, whole = grown(parts), list(chain(*parts))
    assert list(ids) == whole
    assert len(ids) == len(whole)
    assert bool(ids) == bool(whole)
    assert orjson.loads(ids.json()) == whole
    assert [ids[i] for i in range(-len(whole), len(whole))] == whole + whole


@given(PARTS, *[st.none() | st.integers(-80, 80)] * 2, st.none() | st.sampled_from([-2, -1, 1, 3]))
def test_slices_are_those_of_the_list(
    parts: list[list[int]], start: int | None, stop: int | None, step: int | None
) -> None:
    ids, whole = grown(parts), list(chain(*parts))
    assert ids[start:stop:step] == whole[start:stop:step]


@given(PARTS, st.integers(0, 80))
def test_ids_from_an_index_on_are_returned_packed(parts: list[list[int]], start: int) -> None:
    ids, whole = grown(parts), list(chain(*parts))
    assert ids.behind(start) == packed(whole[start:]) == struct.pack(f"<{len(whole[start:])}i", *whole[start:])
    assert unpacked(ids.behind(start)) == whole[start:]


@given(PARTS)
def test_the_digest_is_of_the_ids_however_they_came(parts: list[list[int]]) -> None:
    whole = list(chain(*parts))
    assert grown(parts).digest == TokenIds(whole).digest
    assert TokenIds(whole).digest == hashlib.blake2b(packed(whole), digest_size=16).hexdigest()


def test_extending_does_not_change_the_original() -> None:
    first = TokenIds([1, 2])
    left, right = first.extended([3]), first.extended([4, 5])
    assert [list(ids) for ids in (first, left, right)] == [[1, 2], [1, 2, 3], [1, 2, 4, 5]]
    assert first.extended([]) is first


def test_the_json_of_a_part_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def note(raw: bytes) -> list[int]:
        written.append(len(unpacked(raw)))
        return unpacked(raw)

    monkeypatch.setattr("agentrl.domain.tokens.unpacked", note)
    ids = TokenIds()
    lengths = [0]
    for turn in range(5):
        ids = ids.extended([turn] * 3)
        lengths.append(len(orjson.loads(ids.json())))
    assert all(after - before == 3 for before, after in pairwise(lengths))
    assert written == [3] * 5


@pytest.mark.parametrize("at", [3, -4])
def test_an_index_outside_is_an_error(at: int) -> None:
    with pytest.raises(IndexError, match=r"3 token ids"):
        TokenIds([7, 8, 9])[at]

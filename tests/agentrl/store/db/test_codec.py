"""Arrays and JSON survive packing; ids sort by creation."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.store.db import codec


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_ids_survive_packing(ids):
    assert codec.unpack_ids(codec.pack_ids(ids)).tolist() == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_survive_packing_bit_for_bit(logprobs):
    assert codec.unpack_logprobs(codec.pack_logprobs(logprobs)).tolist() == logprobs


@st.composite
def some_tables(draw):
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(0, 40))
    numbers = draw(st.lists(st.floats(width=32), min_size=rows * columns, max_size=rows * columns))
    return np.array(numbers, np.float32).reshape(rows, columns)


@given(some_tables(), some_tables())
def test_tables_survive_packing_bit_for_bit(first, second):
    found = codec.unpack_tables(codec.pack_tables(first, second), first.shape, len(second))
    for table, unpacked in zip((first, second), found, strict=True):
        assert unpacked.shape == table.shape
        assert unpacked.tobytes() == table.tobytes()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_json_survives_packing(value):
    assert codec.unpack_json(codec.pack_json(value)) == value


def test_ids_are_unique_fixed_length_and_sorted():
    ids = [codec.new_id() for _ in range(1000)]
    assert sorted(set(ids)) == ids
    assert {len(i) for i in ids} == {32}


def test_json_text_is_read_as_it_was_written() -> None:
    value = {"reward/mean": 0.5, "names": ["a", None, True], "n": -3}
    assert codec.read_json_text(codec.json_text(value)) == value
    assert codec.read_json_text('{"a": Infinity}') == {"a": float("inf")}

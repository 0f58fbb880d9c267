"""The token tree of a session: which earlier call a new one extends, and what the cache of trees keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.tokens import TokenIds
from agentrl.proxy.calls.token_tree import Tree, TreeCache, with_texts
from agentrl.store.calls.call_tree import Node


def node(
    id: str,
    delta: Sequence[int] = (1,),
    output: Sequence[int] = (2,),
    parent: Node | None = None,
    *,
    key: bytes = b"",
    textless: bytes | None = None,
    messages: int = 0,
    text: str | None = None,
) -> Node:
    return Node(
        id=id,
        conversation_key=key or id.encode(),
        parent=parent,
        n_delta=len(delta),
        role="main",
        ids=TokenIds([*delta, *output], parent.ids if parent is not None else None),
        system_hash=None,
        tools_hash=None,
        messages=messages,
        textless_key=textless,
        text=text,
    )


def tree(*nodes: Node) -> Tree:
    made = Tree()
    for one in nodes:
        made.add(one)
    return made


# -- by messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([b"", b"system", b"user", b"turn 1", b"user 2", b"turn 2", b"user 3"], (5, "second")),
        ([b"", b"system", b"user", b"turn 1", b"user 2", b"turn 2"], (5, "second")),  # it adds no message
        ([b"", b"system", b"user", b"turn 1", b"edited"], (3, "first")),
        ([b"", b"turn 1", b"user 2"], (1, "first")),
        ([b"", b"system", b"user", b"without text", b"user 2"], (3, "second")),
        ([b"", b"system", b"user", b"other", b"user 2"], None),
        ([b"turn 1", b"user 2", b"user 3"], None),  # the first key is of no message
        ([b""], None),
    ],
)
def test_a_call_extends_the_deepest_one_on_its_chain(chain, expected):
    calls = tree(node("first", key=b"turn 1"), node("second", key=b"turn 2", textless=b"without text"))
    found = calls.deepest(chain)
    assert (found and (found[0], found[1].id)) == expected


def test_the_later_of_two_calls_with_one_conversation_is_extended():
    calls = tree(node("first", key=b"same"), node("second", key=b"same"))
    assert calls.deepest([b"", b"same", b"more"]) == (1, calls.by_id["second"])
    assert set(calls.by_id) == {"first", "second"}


ROOT = node("root", [1, 2], [3])
LEFT, RIGHT = node("left", [4, 5], [6], ROOT), node("right", [7], [8], ROOT)
LEAF = node("leaf", [9], [10], LEFT)
FAMILY = tree(ROOT, LEFT, RIGHT, LEAF, node("alone", [4], [5]))


@pytest.mark.parametrize(
    ("parent", "delta", "expected"),
    [
        (ROOT, [4, 5], False),  # the prompt of `left` once more
        (ROOT, [4, 5, 6], False),
        (ROOT, [7], False),
        (ROOT, [4, 9], True),
        (ROOT, [9], True),  # the prompt of `leaf`, which does not go on from the root itself
        (LEAF, [4], False),  # nothing goes on from it
    ],
)
def test_a_call_branches_where_others_go_on_with_another_prompt(parent, delta, expected):
    assert FAMILY.branches_at(parent, delta) is expected


def test_the_descendants_of_a_call_are_found():
    assert FAMILY.below(ROOT) == {"left", "right", "leaf"}
    assert FAMILY.below(LEFT) == {"leaf"}
    assert FAMILY.below(LEAF) == set()


# -- by tokens and text --------------------------------------------------------------------------------------------


def decode(ids: Sequence[int]) -> str:
    """Every token is a word with a space before it, but for the text's first space: as Llama's tokenizers do."""
    return "".join(f" {'abc'[i]}" for i in ids).removeprefix(" ")


pieces = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@st.composite
def calls(draw):
    """A tree of calls, parents first, with prompts and outputs of few different tokens."""
    made: list[Node] = []
    for i in range(draw(st.integers(1, 7))):
        made.append(node(str(i), draw(pieces), draw(pieces), draw(st.sampled_from([None, *made]))))
    return made


def prompt_of(one: Node) -> list[int]:
    return list(one.ids)[: len(one.ids) - one.n_output]


def longest(made: Sequence[Node], ids: list[int], sequence) -> int | None:
    """The length of the longest sequence that begins `ids`."""
    return max((len(own) for one in made if ids[: len(own := sequence(one))] == own), default=None)


@given(calls(), st.data())
def test_a_raw_prompt_extends_the_longest_call_that_begins_it(made, data):
    """As ids and as text; the call itself, or only its prompt."""
    start = list(data.draw(st.sampled_from(made)).ids)
    ids = start[: data.draw(st.integers(1, len(start)))] + data.draw(pieces)
    calls = tree(*made)
    for found, sequence in [
        (calls.longest_prefix(ids), lambda one: list(one.ids)),
        (calls.nearest_prompt(ids, decode), prompt_of),
    ]:
        assert (found and found[1]) == longest(made, ids, sequence)
        assert found is None or sequence(found[0]) == ids[: found[1]]
    text = decode(ids)
    for found, sequence in [
        (calls.longest_text(text, decode), lambda one: list(one.ids)),
        (calls.nearest_prompt(text, decode), prompt_of),
    ]:
        expected = longest(made, ids, sequence)
        assert (found and found[1]) == (expected and len(decode(ids[:expected])))
        assert found is None or decode(sequence(found[0])) == text[: found[1]]


def test_texts_that_clients_drop_are_restored_along_the_path():
    tool_call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    ask, call, result, again = (
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "user", "content": "thanks"},
    )
    done = {"role": "assistant", "content": "mine"}
    first = node("first", messages=2, text="I add them.")
    second = node("second", parent=first, messages=4, text="It is 2.")
    sent = [ask, call, result, done, again]
    assert with_texts(sent, second) == [ask, call | {"content": "I add them."}, result, done, again]
    assert with_texts(sent, node("plain", parent=second, messages=4)) == with_texts(sent, second)
    assert sent[1] is call
    assert call["content"] is None


# -- the cache -----------------------------------------------------------------------------------------------------


class Store:
    """What the store would answer: calls with their numbers; `asked` lists what was asked for."""

    def __init__(self) -> None:
        self.committed: dict[str, list[Node | None]] = {}
        self.asked: list[tuple[str, int, list[str]]] = []
        self.meanwhile = lambda: None

    async def load(self, session_id: str, seq: int, known: Mapping[str, Node]) -> tuple[int, list[Node]]:
        self.asked.append((session_id, seq, list(known)))
        calls = self.committed.get(session_id, [])
        self.meanwhile()
        return len(calls), [one for one in calls[seq:] if one is not None]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def cache(store: Store) -> TreeCache:
    return TreeCache(store.load, capacity=2)


async def test_a_tree_is_loaded_once_and_refreshed_with_new_calls(store, cache):
    first, second = node("1"), node("2")
    store.committed["s"] = [first]
    assert (await cache.get("s")).by_id == {"1": first}
    store.committed["s"] = [first, second]
    assert (await cache.get("s")).by_id == {"1": first}
    assert (await cache.get("s", fresh=True)).by_id == {"1": first, "2": second}
    assert store.asked == [("s", 0, []), ("s", 1, ["1"])]


async def test_calls_committed_by_this_replica_are_not_loaded(store, cache):
    cache.plant("s")
    first, third = node("1"), node("3")
    cache.commit("s", 1, first)
    cache.commit("s", 2, None)  # a call to another model
    cache.commit("s", 3, third)
    found = await cache.get("s")
    assert (found.seq, found.by_id) == (3, {"1": first, "3": third})
    assert store.asked == []


async def test_a_commit_behind_a_gap_comes_with_the_next_fresh_tree(store, cache):
    cache.plant("s")
    first, second = node("1"), node("2")
    cache.commit("s", 2, second)  # another replica has committed the first
    assert (await cache.get("s")).by_id == {}
    store.committed["s"] = [first, second]
    found = await cache.get("s", fresh=True)
    assert (found.seq, list(found.by_id)) == (2, ["1", "2"])
    cache.commit("unknown", 1, first)
    assert (await cache.get("unknown")).by_id == {}


async def test_a_commit_during_a_load_is_not_replaced(store, cache):
    cache.plant("s")
    here, again, next_one = node("1"), node("1"), node("2")
    store.committed["s"] = [again]

    def commits() -> None:
        cache.commit("s", 1, here)
        cache.commit("s", 2, next_one)

    store.meanwhile = commits
    found = await cache.get("s", fresh=True)
    assert found.seq == 2
    assert found.by_id["1"] is here
    assert list(found.by_id) == ["1", "2"]


async def test_the_least_recently_used_tree_is_evicted(store, cache):
    for session in ("a", "b"):
        await cache.get(session)
    await cache.get("a")
    await cache.get("c")  # no room for b
    await cache.get("a")
    assert [session for session, *_ in store.asked] == ["a", "b", "c"]
    await cache.get("b")
    assert [session for session, *_ in store.asked] == ["a", "b", "c", "b"]


async def test_a_forgotten_session_is_loaded_again(store, cache):
    await cache.get("a")
    cache.forget("a")
    cache.forget("never seen")
    await cache.get("a")
    assert [session for session, *_ in store.asked] == ["a", "a"]

"""Returns of a session's calls: tables, and what must hold for any session."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.credit import CallFact, SessionRewards, call_returns, counting, named_outcomes, outcome


def chain(n: int) -> list[CallFact]:
    return [CallFact(str(i), str(i - 1) if i else None, "main") for i in range(n)]


@pytest.mark.parametrize(
    ("rewards", "session", "discount", "expected"),
    [
        ([], 1.0, 1.0, []),
        ([None, None], 1.0, 1.0, [1.0, 1.0]),
        ([None, None], 1.0, 0.5, [0.5, 1.0]),
        ([0.2, None], None, 0.5, [0.2, 0.0]),
        ([0.2, 0.4], 1.0, 0.5, [0.9, 1.4]),
        ([1.0, 2.0, 3.0], None, 0.0, [1.0, 2.0, 3.0]),
    ],
)
def test_main_calls_in_order(rewards, session, discount, expected):
    of_calls = {str(i): value for i, value in enumerate(rewards) if value is not None}
    found = call_returns(chain(len(rewards)), SessionRewards(session, {}, of_calls), discount)
    assert list(found.values()) == pytest.approx(expected)


TREE = [
    CallFact("root", None, "main"),
    CallFact("left", "root", "main"),
    CallFact("right", "root", "main"),
    CallFact("side", "root", "side"),
    CallFact("end", "right", "main"),
]


def test_a_branch_reward_reaches_only_its_path():
    found = call_returns(TREE, SessionRewards(branches={"left": 1.0}), 0.5)
    assert found == {"root": 0.5, "left": 1.0, "right": 0.0, "end": 0.0}


def test_a_call_reward_follows_the_order_of_main_calls_across_forks():
    found = call_returns(TREE, SessionRewards(calls={"right": 1.0}), 0.5)
    assert found == {"root": 0.25, "left": 0.5, "right": 1.0, "end": 0.0}


def test_side_calls_carry_no_value_unless_rewarded_themselves():
    assert "side" not in call_returns(TREE, SessionRewards(session=1.0), 1.0)
    rewarded = call_returns(TREE, SessionRewards(session=1.0, calls={"side": 0.25}), 1.0)
    assert rewarded["side"] == 0.25
    assert rewarded["root"] == 1.0  # a side call's reward stays its own


def test_a_branch_reward_skips_side_calls_except_a_rewarded_one():
    calls = [*TREE, CallFact("check", "side", "side"), CallFact("back", "check", "main")]
    found = call_returns(calls, SessionRewards(branches={"back": 1.0}), 0.5)
    assert found == {"root": 0.5, "left": 0.0, "right": 0.0, "end": 0.0, "back": 1.0}
    found = call_returns(calls, SessionRewards(branches={"check": 1.0}), 0.5)
    assert found == {"root": 0.5, "left": 0.0, "right": 0.0, "end": 0.0, "back": 0.0, "check": 1.0}


SEARCHES = [
    CallFact("ask", None, "main"),
    CallFact("a1", None, "subagent"),
    CallFact("b1", None, "subagent"),
    CallFact("a2", "a1", "subagent"),
    CallFact("b2", "b1", "subagent"),
    CallFact("a3", "a1", "subagent"),
    CallFact("tell", "ask", "main"),
]


def test_each_conversation_of_a_sub_agent_shares_the_outcome_along_its_own_order():
    found = call_returns(SEARCHES, SessionRewards(session=1.0, calls={"b1": 0.25, "tell": 2.0}), 0.5)
    assert found == {"ask": 1.5, "tell": 3.0, "a1": 0.25, "a2": 0.5, "a3": 1.0, "b1": 0.75, "b2": 1.0}
    assert next(iter(found)) == "ask"


def test_a_branch_reward_follows_a_sub_agents_path():
    found = call_returns(SEARCHES, SessionRewards(branches={"a3": 1.0}), 0.5)
    assert found == {"ask": 0.0, "tell": 0.0, "a1": 0.5, "a2": 0.0, "a3": 1.0, "b1": 0.0, "b2": 0.0}


def test_the_outcome_is_the_first_main_calls_return():
    calls = [CallFact("warmup", None, "side"), *chain(2)]
    rewards = SessionRewards(session=1.0, calls={"warmup": 5.0})
    assert outcome(calls, call_returns(calls, rewards, 0.5)) == 0.5
    assert outcome([], {}) == 0.0


def test_the_newest_reward_of_a_name_counts_and_names_are_summed():
    facts = [
        (None, "session", "reward", 0.2),
        (None, "session", "reward", 0.9),
        (None, "session", "style", 0.5),
        ("a", "call", "reward", 1.0),
        ("a", "call", "style", 0.25),
        ("a", "branch", "reward", 2.0),
    ]
    named = {"reward": SessionRewards(0.9, {"a": 2.0}, {"a": 1.0}), "style": SessionRewards(0.5, {}, {"a": 0.25})}
    assert counting(facts) == SessionRewards(pytest.approx(1.4), {"a": 2.0}, {"a": 1.25}, named)
    assert not counting([]).any


values = st.floats(-10, 10)


@given(st.lists(values, min_size=1, max_size=8), values, st.floats(0, 1))
def test_returns_satisfy_the_recursion(of_calls, session, discount):
    rewards = SessionRewards(session, {}, {str(i): v for i, v in enumerate(of_calls)})
    found = list(call_returns(chain(len(of_calls)), rewards, discount).values())
    for i, value in enumerate(of_calls[:-1]):
        assert found[i] == pytest.approx(value + discount * found[i + 1])
    assert found[-1] == pytest.approx(of_calls[-1] + session)


@given(st.lists(st.tuples(st.integers(0, 4), values), max_size=6), values, st.floats(0, 1))
def test_returns_are_linear_in_the_rewards(branches, session, discount):
    """Every reward adds its own share, whatever else was given."""
    names = [call.id for call in TREE]
    total: dict[str, float] = {}
    for i, value in branches:
        total[names[i]] = total.get(names[i], 0.0) + value
    together = call_returns(TREE, SessionRewards(session, total), discount)
    apart = call_returns(TREE, SessionRewards(session), discount)
    for i, value in branches:
        for call_id, share in call_returns(TREE, SessionRewards(branches={names[i]: value}), discount).items():
            apart[call_id] = apart.get(call_id, 0.0) + share
    assert together == pytest.approx(apart, abs=1e-9)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["session", "branch", "call"]), values), max_size=12),
    st.floats(0, 1),
)
def test_outcomes_of_the_names_add_up_to_the_outcome(given_rewards, discount):
    facts = []
    for i, (name, scope, value) in enumerate(given_rewards):
        facts.append((None if scope == "session" else TREE[i % len(TREE)].id, scope, name, value))
    rewards = counting(facts)
    named = named_outcomes(TREE, rewards, discount)
    assert named.keys() == {name for name, _, _ in given_rewards}
    assert sum(named.values()) == pytest.approx(outcome(TREE, call_returns(TREE, rewards, discount)), abs=1e-9)


@st.composite
def sessions(draw):
    """Calls of any role; those that extend an earlier one mostly have its role."""
    calls: list[CallFact] = []
    for i in range(draw(st.integers(1, 9))):
        parent = draw(st.sampled_from([None, *calls]))
        role = draw(st.sampled_from(["main", "subagent", "side", *([parent.role] * 5 if parent else [])]))
        calls.append(CallFact(str(i), parent and parent.id, role))
    return calls


@given(sessions(), values, st.lists(st.tuples(st.integers(0, 8), values), max_size=4), st.floats(0, 1))
def test_sub_agents_and_side_calls_never_change_the_main_calls(calls, session, of_calls, discount):
    rewards = SessionRewards(session, {}, {str(i): value for i, value in of_calls})
    main = [call for call in calls if call.is_main]
    together, alone = call_returns(calls, rewards, discount), call_returns(main, rewards, discount)
    assert {call.id: together[call.id] for call in main} == alone
    assert outcome(calls, together) == outcome(main, alone)


@given(sessions(), values)
def test_without_a_discount_every_sharing_call_has_the_sessions_reward(calls, session):
    found = call_returns(calls, SessionRewards(session), 1.0)
    assert found == {call.id: session for call in calls if call.shares}


@given(sessions(), values, st.floats(0, 1))
def test_a_sub_agents_conversation_is_credited_as_if_it_were_a_session(calls, session, discount):
    """Take one conversation out and make its calls main: the same returns."""
    whole = call_returns(calls, SessionRewards(session), discount)
    for start in calls:
        family = {start.id}
        for call in calls:
            if call.role == "subagent" and call.parent_id in family:
                family.add(call.id)
        above = next((call.role for call in calls if call.id == start.parent_id), None)
        if start.role != "subagent" or above == "subagent":
            continue
        alone = [CallFact(call.id, call.parent_id, "main") for call in calls if call.id in family]
        expected = call_returns(alone, SessionRewards(session), discount)
        assert {call.id: whole[call.id] for call in alone} == pytest.approx(expected)

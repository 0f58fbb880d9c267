"""What differs between configurations, by dotted key, with secrets masked."""

from __future__ import annotations

import orjson

from agentrl.dashboard.pages.compare_page import differences


def test_only_what_differs_is_listed_by_its_dotted_key() -> None:
    one = {"name": "a", "trainer": {"lr": 1e-5, "betas": [0.9, 0.99]}, "rollout": {"group_size": 8}, "same": 1}
    two = {"name": "b", "trainer": {"lr": 1e-4, "betas": [0.9, 0.95]}, "rollout": {"group_size": 8}, "same": 1}
    assert differences([one, two]) == [
        ("name", ["a", "b"]),
        ("trainer.betas", ["[0.9, 0.99]", "[0.9, 0.95]"]),
        ("trainer.lr", ["1e-05", "0.0001"]),
    ]


def test_an_absent_key_differs_from_null_and_a_number_from_its_text() -> None:
    assert differences([{"a": None}, {}]) == [("a", ["null", None])]
    assert differences([{"a": 1}, {"a": "1"}]) == [("a", ["1", "1"])]
    assert differences([{"a": {}}, {"a": {"b": True}}]) == [("a", ["{}", None]), ("a.b", [None, "true"])]
    assert differences([{}, {}]) == []


def test_no_secret_is_shown() -> None:
    secrets = [
        {"api_key": f"sk-{n}", "proxy": {"upstreams": [{"token": f"t-{n}"}]}, "database": f"postgresql://u:pw-{n}@h/d"}
        for n in range(2)
    ]
    shown = orjson.dumps(differences([*secrets, {"api_key": ""}])).decode()
    for n in range(2):
        assert f"sk-{n}" not in shown
        assert f"t-{n}" not in shown
        assert f"pw-{n}" not in shown
    assert "***" in shown


def test_more_than_two_are_compared() -> None:
    assert differences([{"a": 1}, {"a": 1}, {"a": 2}]) == [("a", ["1", "1", "2"])]


def test_deep_settings_are_read() -> None:
    deep: dict = {"x": 1}
    for _ in range(60):
        deep = {"a": deep}
    (found,) = differences([deep, {}])[:1]
    assert found[0].endswith(".x")

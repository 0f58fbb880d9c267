"""Cookies: signed, bounded in time, without the key."""

from __future__ import annotations

import pytest

from agentrl.dashboard import sign_in
from agentrl.dashboard.sign_in import LASTS_S, Signer, Viewer
from agentrl.store.db.codec import hash_key

SIGNER = Signer(b"secret")


def test_a_cookie_names_the_hash_of_its_key_and_not_the_key() -> None:
    cookie = SIGNER.cookie("arl-run-abc")
    assert SIGNER.key_hash(cookie) == hash_key("arl-run-abc")
    assert "arl-run-abc" not in cookie


def test_processes_with_one_secret_accept_each_others_cookies_and_others_do_not() -> None:
    cookie = Signer.of("admin-key").cookie("a-key")
    assert Signer.of("admin-key").key_hash(cookie) == hash_key("a-key")
    assert Signer.of("another").key_hash(cookie) is None


def test_a_cookie_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    cookie = SIGNER.cookie("a-key")
    now = sign_in.time.time()
    monkeypatch.setattr(sign_in.time, "time", lambda: now + LASTS_S - 5)
    assert SIGNER.key_hash(cookie) is not None
    monkeypatch.setattr(sign_in.time, "time", lambda: now + LASTS_S + 1)
    assert SIGNER.key_hash(cookie) is None


def changed(cookie: str, part: int, value: str) -> str:
    parts = cookie.split(".")
    parts[part] = value
    return ".".join(parts)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "..",
        "a.b.c",
        "1" * 400,
        "９.b.c",
        changed(SIGNER.cookie("a-key"), 0, "99999999999"),
        changed(SIGNER.cookie("a-key"), 1, hash_key("another")),
        changed(SIGNER.cookie("a-key"), 2, "0" * 64),
        SIGNER.cookie("a-key") + ".x",
        SIGNER.cookie("a-key").rpartition(".")[0],
    ],
    ids=["empty", "no parts", "words", "long", "wide digit", "time", "key", "signature", "more", "no signature"],
)
def test_a_forged_cookie_names_nobody(wrong: str) -> None:
    assert SIGNER.key_hash(wrong) is None


def test_a_viewer_of_one_run_sees_it_alone_and_one_of_all_sees_all() -> None:
    assert Viewer("a").may_see("a")
    assert not Viewer("a").may_see("b")
    assert Viewer().may_see("b")

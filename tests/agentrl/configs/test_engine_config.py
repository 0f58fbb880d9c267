"""Addresses of engines: an URL, and perhaps the name of a backend before it."""

from __future__ import annotations

import pytest

from agentrl.configs.engine_config import EngineAddress, EngineConfig, engine_address, engine_url


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:1/", EngineAddress("http://127.0.0.1:1")),
        ("sglang+https://gpu-3/a+b", EngineAddress("https://gpu-3/a+b", "sglang")),
        ("https://gpu-3/a+b", EngineAddress("https://gpu-3/a+b")),
    ],
)
def test_an_address_may_name_a_backend(text: str, address: EngineAddress) -> None:
    assert engine_address(text) == address
    assert engine_url(text) == address.url
    assert EngineConfig(urls=[text]).urls == [text.rstrip("/")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("triton+http://gpu-3", "names the backend 'triton', but there are sglang"),
        ("+http://gpu-3", "must be http://HOST"),
        ("sglang+sglang+http://gpu-3", "must be http://HOST"),
        ("sglang+http://me:secret@gpu-3", "must not contain a password"),
        ("sec+ret@gpu-3", "must not contain a password"),
    ],
)
def test_other_addresses_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        engine_address(text)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match=says):
        EngineConfig(urls=[text])

"""Keys of engines: from the environment, to the engine they are of, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from agentrl.engine.engine_client import Health
from agentrl.engine.engine_keys import EngineKeys, authorization, derived_key, key_digest, new_key
from agentrl.engine.prepared.version_host import VersionHost
from agentrl.engine.sglang import keyed_sglang
from agentrl.engine.sglang.keyed_sglang import guard
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.environment import ENGINE_KEY, ENGINE_KEYS, key_from
from agentrl.errors import ConfigError, EngineError
from agentrl.testing import FakeEngine
from agentrl.versions.version_cache import VersionCache

GPU = "http://gpu-3:30000"


def test_each_engine_has_its_own_key_or_the_common_one() -> None:
    keys = EngineKeys.from_env({ENGINE_KEY: "common", ENGINE_KEYS: json.dumps({GPU + "/": "its-own"})})
    assert (keys.of(GPU), keys.of(f"sglang+{GPU}"), keys.of("http://127.0.0.1:1")) == ("its-own", "its-own", "common")
    assert EngineKeys.from_env(keys.variables([f"sglang+{GPU}"])) == EngineKeys(by_url={GPU: "its-own"})
    assert "its-own" not in repr(keys)
    assert EngineKeys().variables([GPU]) == {}


@pytest.mark.parametrize(
    "env", [{ENGINE_KEYS: "{"}, {ENGINE_KEYS: "[]"}, {ENGINE_KEYS: '{"a": 1}'}, {ENGINE_KEYS: '{"a": "b\\n"}'}]
)
def test_invalid_keys_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=ENGINE_KEYS):
        EngineKeys.from_env(env)


def test_an_engine_off_loopback_must_have_a_key() -> None:
    EngineKeys(common="k").check([GPU])
    EngineKeys().check(["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"])
    with pytest.raises(ConfigError, match=r"gpu-3.*AGENTRL_ENGINE_KEY"):
        EngineKeys().check([GPU])


def test_an_engine_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 is given twice"):
        EngineKeys().check(["http://127.0.0.1:1", "sglang+http://127.0.0.1:1/"])


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@gpu-3:30000", "me:hunter2@gpu-3", "http://me:hun/ter2@gpu-3", "me:hun+ter2@gpu-3"]
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="password") as caught:
        EngineKeys(common="k").check([url])
    assert "ter2" not in str(caught.value)


def test_a_key_is_sent_in_the_authorization_header() -> None:
    assert authorization(None) == {}
    assert authorization("abc") == {"Authorization": "Bearer abc"}
    assert authorization("me:pw") == {"Authorization": "Basic bWU6cHc="}
    assert ":" not in new_key() != new_key()


async def test_a_client_sends_its_key_with_every_request() -> None:
    with FakeEngine(key="abc") as engine:
        async with aiohttp.ClientSession() as http:
            without, with_it = SGLangClient(engine.url, http), SGLangClient(engine.url, http, key="abc")
            assert await without.health() is Health.SERVING  # which is open
            for forbidden in (without.model_info, without.pause, without.flush_cache):
                with pytest.raises(EngineError, match="401"):
                    await forbidden()
            with pytest.raises(EngineError, match="401"):
                await anext(without.generate(rid="r" * 32, input_ids=[1], sampling_params={}))
            assert engine.calls == []
            assert (await with_it.model_info()).weight_version == 0
            chunks = [c async for c in with_it.generate(rid="r" * 32, input_ids=[1], sampling_params={})]
            assert chunks[-1].finish_reason == "stop"


def test_an_app_with_a_key_refuses_requests_without_it_and_web_pages(tmp_path: Path) -> None:
    async def hello(_: object) -> PlainTextResponse:
        return PlainTextResponse("hello")

    cors = Middleware(CORSMiddleware, allow_origins=["*"], allow_credentials=True)
    app = Starlette(routes=[Route(path, hello) for path in ("/health", "/ready", "/x")], middleware=[cors])
    guard(app, "abc", VersionHost(VersionCache(tmp_path, 1), "abc"))
    client = TestClient(app, headers={"Origin": "https://evil.example"})
    answers = {
        path: client.get(path, headers=headers).status_code
        for path, headers in {
            "/health": {},
            "/ready": {},
            "/x": {},
            "/x?1": {"Authorization": "Bearer abd"},
            "/x?2": {"Authorization": "Bearer abc"},
            "/health_generate": {},
            "/health/../x": {},
        }.items()
    }
    assert answers == {
        "/health": 200,
        "/ready": 200,
        "/x": 401,
        "/x?1": 401,
        "/x?2": 200,
        "/health_generate": 401,
        "/health/../x": 401,
    }
    assert client.options("/x", headers={"Access-Control-Request-Method": "POST"}).status_code == 401
    assert "access-control-allow-origin" not in client.get("/health").headers


def test_modes_that_bypass_the_key_check_are_refused_at_the_start() -> None:
    class Args:
        grpc_mode = True
        tokenizer_worker_num = 2

    with pytest.raises(SystemExit, match="--grpc-mode, --tokenizer-worker-num"):
        keyed_sglang.check(Args)


def test_an_engine_s_own_key_depends_on_the_admin_key_and_the_url_alone() -> None:
    keys = EngineKeys(admin_key="admin")
    own = keys.own("http://10.0.0.1:30000")
    assert own == keys.own("http://10.0.0.1:30000/") == derived_key("admin", "http://10.0.0.1:30000")
    assert len({own, keys.own("http://10.0.0.2:30000"), derived_key("other", "http://10.0.0.1:30000")}) == 3
    assert "admin" not in own
    assert ":" not in own  # else it would be sent as a user with a password
    assert key_from({"AGENTRL_ENGINE_KEY": own}, "AGENTRL_ENGINE_KEY") == own


def test_a_key_is_recognized_by_its_digest() -> None:
    keys, url = EngineKeys(admin_key="admin"), "http://10.0.0.1:30000"
    assert keys.derives(url, key_digest(derived_key("admin", url)))
    assert not keys.derives(url, key_digest(derived_key("other", url)))
    assert not keys.derives(url, "é")
    assert "admin" not in repr(keys)


def test_an_engine_with_its_own_key_needs_no_common_one() -> None:
    with pytest.raises(ConfigError, match="loopback"):
        EngineKeys().check(["http://10.0.0.1:30000"])
    EngineKeys().check(["http://10.0.0.1:30000"], has_own=True)

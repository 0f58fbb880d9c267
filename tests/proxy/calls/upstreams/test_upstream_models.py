"""The upstreams of a configuration: a missing key or a wrong value is refused by name."""

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.configs.proxy_config import UpstreamConfig
from agentrl.errors import ConfigError
from agentrl.proxy.calls.upstreams import upstream_models


def test_a_missing_key_is_named_before_anything_serves(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = UpstreamConfig(base_url="http://h/v1", api_key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match=r"proxy\.upstreams\.judge\.api_key_env.*NO_SUCH_KEY"):
        upstream_models.from_config({"judge": config})


@pytest.mark.parametrize(
    ("upstreams", "complaint"),
    [
        ({"test": {"base_url": "http://h/v1"}}, "the name is reserved for the policy"),
        ({"default": {"base_url": "http://h/v1"}}, "the name is reserved for the policy"),
        ({"a b": {"base_url": "http://h/v1"}}, "proxy.upstreams.a b"),
        ({"judge": {"base_url": "h/v1"}}, "must be http"),
        ({"judge": {"base_url": "http://me:secret@h/v1"}}, "use api_key_env"),
        ({"judge": {"base_url": "http://h/v1?key=x"}}, "without a query"),
        ({"judge": {"base_url": "http://h/v1", "timeout_s": 0}}, "proxy.upstreams.judge.timeout_s"),
        ({"judge": {"base_url": "http://h/v1", "modell": "x"}}, "did you mean 'model'"),
    ],
)
def test_a_wrong_upstream_is_refused_by_name(upstreams, complaint):
    config = {"name": "test", "model": "tiny", "agent": "a:B", "tasks": "t", "proxy": {"upstreams": upstreams}}
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_config(config)
    assert "secret" not in str(caught.value)

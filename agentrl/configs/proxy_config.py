"""The section `proxy`: the recording proxy, its limits, and upstream models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from agentrl.configs.section import NonNegative, Positive, Seconds, Section, plain_address

MAX_REWARD = 1e6
"""Default of `proxy.max_reward`."""


class UpstreamConfig(Section):
    """Another model, for example a judge. Calls that name it are forwarded and recorded."""

    base_url: str
    """Base URL of its API, with `/v1` (`https://api.openai.com/v1`, `https://api.anthropic.com/v1`)."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """Its name at the upstream; null: the name used here."""
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    """The proxy's environment variable with the API key; null: send none. The key itself is not stored."""
    timeout_s: Seconds = 600.0
    """Timeout of one call."""

    @field_validator("base_url")
    @classmethod
    def _is_a_plain_address(cls, value: str) -> str:
        return plain_address(value, "; use api_key_env")


class ProxyConfig(Section):
    """The recording proxy."""

    host: str = "127.0.0.1"
    """Address to listen on. An address off loopback requires an admin key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 picks a free one."""
    public_url: str | None = None
    """Public base URL of the proxy, for example `https://agents.example.org`; URLs in its answers start with it. null:
    the client's Host header, if that is an IP address, `localhost`, this machine's name or in `allowed_hosts`.
    """
    allowed_hosts: list[str] = Field(default_factory=list)
    """Further host names to accept in a Host header, without a port."""
    workers: Positive = 1
    """Number of processes that serve the port; each is a replica."""
    metrics_public: bool = False
    """Serve `/metrics` without a key; else it requires a run or admin key."""
    request_timeout_s: Seconds = 600.0
    """Timeout of a model call, with the wait for an engine."""
    retry_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long sampling continues after a client disconnects, so that a retry gets the answer; 0: stop at once."""
    restore_dropped_text: bool = False
    """Match a tool call to its recorded turn even if the client dropped the text sampled beside it; the prompt then has
    the dropped text. The call must be unchanged and have the same id. Else the call forks.
    """
    max_body_bytes: Positive = 32 * 1024 * 1024
    """Maximum request size; larger requests get 413."""
    body_timeout_s: Seconds = 60.0
    """Timeout for receiving a request body; then the request gets 408."""
    max_concurrent_calls: Positive = 4096
    """Maximum answers that one proxy process samples at once; further calls get 429."""
    max_concurrent_calls_per_session: Positive = 512
    """The same limit per session with its sub-agents. Also the maximum answers per request (`n`, prompts)."""
    max_calls_per_session: Positive | None = None
    """Maximum model calls of a session with its sub-agents, upstream calls included; further calls get 403,
    `session_limit_reached`. null: unlimited.
    """
    max_tokens_per_session: Positive | None = None
    """Maximum sampled tokens of a session with its sub-agents; further calls get 403. null: unlimited."""
    max_subagent_depth: NonNegative = 8
    """Maximum depth of sub-agent sessions below a session; deeper ones get 422. 0: none allowed."""
    max_subagents_per_session: NonNegative = 256
    """Maximum sub-agent sessions below a root session, over all levels; further ones get 422."""
    session_timeout_s: Seconds = 900.0
    """Abandon an open session of an external program after this time without a call or heartbeat."""
    heartbeat_timeout_s: Seconds = 60.0
    """Time without a heartbeat after which a rollout worker is dead and its sessions are abandoned, or a proxy replica
    is dead and its calls are lost.
    """
    engine_watchers: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of proxy replicas that probe an engine; the others read what these saw. With fewer replicas, all do."""
    session_max_s: Seconds = 86400.0
    """Maximum age of an open session; older sessions fail."""
    reward_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """How long an ended session without a reward waits for one; then it is rejected."""
    max_reward: Annotated[float, Field(gt=0, le=1e12)] = MAX_REWARD
    """Maximum absolute value of a reward; larger ones get 422."""
    end_grace_s: Seconds = 30.0
    """How long an ended session waits for its running calls before its trajectories are built."""
    upstreams: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")], UpstreamConfig] = Field(
        default_factory=dict
    )
    """Upstream models, by the name that calls use."""
    named_sessions: bool = False
    """Let a model call with a run key and an unknown `X-Session-ID` open a session with that name."""
    model_aliases: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Further names of the policy besides the run's name and `default`, as shell patterns: `["claude-*", "gpt-*"]` for
    programs that request their provider's models. Upstream names take precedence. Without an upstream, a judge with
    such a name would be the policy.
    """
    clip_max_tokens: bool = False
    """Clip the requested tokens of a call to the room in the context; the call then ends with `length`. Else the call
    is rejected. Calls in Anthropic's dialect are always clipped, since its clients must request a number.
    """

    @field_validator("public_url")
    @classmethod
    def _is_a_plain_address(cls, value: str | None) -> str | None:
        return None if value is None else plain_address(value)

"""The section `proxy`: the recording proxy, its limits, and other models behind it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from agentrl.configs.addresses import plain_address
from agentrl.configs.section import NonNegative, Positive, Seconds, Section

MAX_REWARD = 1e6
"""Largest |value| of a reward, where a run does not say otherwise (`proxy.max_reward`)."""


class UpstreamConfig(Section):
    """Another model beside the policy, for example a judge: calls that name it are passed on and recorded."""

    base_url: str
    """Where it is served, `/v1` included (`https://api.openai.com/v1`, `https://api.anthropic.com/v1`)."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """What it is called there; null: as it is called here."""
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    """The environment variable of the proxy that holds the key; null sends none. The key itself is stored nowhere."""
    timeout_s: Seconds = 600.0
    """Deadline of one call."""

    @field_validator("base_url")
    @classmethod
    def _is_a_plain_address(cls, value: str) -> str:
        return plain_address(value, "; use api_key_env")


class ProxyConfig(Section):
    """The recording proxy."""

    host: str = "127.0.0.1"
    """Address to listen on. Off loopback an admin key must be set."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 picks a free one."""
    public_url: str | None = None
    """Where clients reach the proxy, `https://agents.example.org` say: the beginning of every URL in its answers. null:
    what the client's Host header says, if that is an IP address, `localhost`, this machine's name or allowed."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Other host names that a Host header may say, without a port."""
    workers: Positive = 1
    """Processes that serve the port; each is a replica of its own."""
    metrics_public: bool = False
    """`/metrics` needs no key; else a run or admin key."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one model call, waiting for an engine included."""
    retry_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long an answer is sampled on after its client left, so that a retry gets it. 0 stops at once."""
    restore_dropped_text: bool = False
    """A tool call that comes back without the text that was sampled beside it, and is otherwise the same with the same
    id, stands for the recorded turn: the prompt then has the text that the client dropped. Else such a call forks."""
    max_body_bytes: Positive = 32 * 1024 * 1024
    """Larger requests are refused with 413."""
    body_timeout_s: Seconds = 60.0
    """A request whose body has not arrived after this long is refused with 408."""
    max_concurrent_calls: Positive = 4096
    """Answers that one process of the proxy samples at once; while there are as many, calls get 429."""
    max_concurrent_calls_per_session: Positive = 512
    """The same for one session with its sub-agents', and the most answers that a request may ask for (`n`, prompts)."""
    max_calls_per_session: Positive | None = None
    """Model calls of one session with its sub-agents' sessions, those of other models included; then they are refused
    with 403, `session_limit_reached`. null: any number."""
    max_tokens_per_session: Positive | None = None
    """Sampled tokens, counted alike; once there are as many, calls are refused in the same way. null: any number."""
    max_subagent_depth: NonNegative = 8
    """Levels of sub-agents' sessions below a session; deeper ones are refused with 422. 0: none."""
    max_subagents_per_session: NonNegative = 256
    """Sub-agents' sessions below a root session, on all levels together; more are refused with 422."""
    session_timeout_s: Seconds = 900.0
    """An open session of an outside program that made no call and sent no heartbeat for this long is abandoned."""
    heartbeat_timeout_s: Seconds = 60.0
    """A rollout worker that sent no heartbeat for this long is dead, and its sessions are abandoned; a silent proxy
    replica too, and its calls are lost."""
    session_max_s: Seconds = 86400.0
    """A session that is open for this long fails, whatever it does."""
    reward_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """How long an ended session without any reward waits for one before it is rejected."""
    max_reward: Annotated[float, Field(gt=0, le=1e12)] = MAX_REWARD
    """Rewards beyond ± this are refused with 422, however they come in."""
    end_grace_s: Seconds = 30.0
    """How long an ended session waits for its running calls before its trajectories are built."""
    upstreams: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")], UpstreamConfig] = Field(
        default_factory=dict
    )
    """Other models that calls may name, by the name that calls use."""
    named_sessions: bool = False
    """A model call with a run key and an `X-Session-ID` that is not known opens a session of that name."""
    model_aliases: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Names besides the run's and `default` that reach the policy, as shell patterns: `["claude-*", "gpt-*"]` for
    programs that name a model of their provider. An upstream of that name goes first. A judge by such a name would be
    the policy."""
    clip_max_tokens: bool = False
    """A call that asks for more tokens than the context has room for gets what room there is, and ends with `length`;
    else it is refused. Anthropic's dialect clips always, as Anthropic does: its clients must ask for a number."""

    @field_validator("public_url")
    @classmethod
    def _is_a_plain_address(cls, value: str | None) -> str | None:
        return None if value is None else plain_address(value)

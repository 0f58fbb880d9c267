"""Known coding agents and the settings that the doctor recommends for each (docs/frameworks.md has all of them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from agentrl.diagnosis.record import Session
from agentrl.domain.schemas import ForkReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Coder:
    """A coding agent: how to recognise it, and its settings."""

    name: str
    commands: tuple[str, ...]  # its programs
    clients: tuple[str, ...]  # prefixes of its User-Agent; SDKs may replace it
    address: str  # sets the proxy's address
    model: str  # sets the model's name
    smaller: str  # reduces its prompts and answers
    quieter: str | None = None  # disables auxiliary calls
    longer: str | None = None  # delays compaction of its history


CODERS = (
    Coder(
        name="Claude Code",
        commands=("claude",),
        clients=("claude-cli",),
        address="set ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ANTHROPIC_MODEL=default",
        model="unset ANTHROPIC_MODEL, or set it to default, and give no --model",
        smaller="start it with --bare and few --tools",
        quieter="set CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
        longer="set DISABLE_AUTO_COMPACT=1",
    ),
    Coder(
        name="Codex",
        commands=("codex",),
        clients=("codex",),
        address="name the proxy in config.toml: model_provider, and [model_providers.NAME] with base_url, env_key and "
        'wire_api = "responses"; it takes no address from OPENAI_BASE_URL',
        model='model = "default" in config.toml, or -m default',
        smaller="set tool_output_token_limit, and --disable what is not needed (multi_agent, plugins, apps)",
        longer="set model_context_window and model_auto_compact_token_limit to what the engine serves",
    ),
    Coder(
        name="OpenCode",
        commands=("opencode",),
        clients=("opencode",),
        address="name the proxy in OPENCODE_CONFIG_CONTENT: provider.NAME with npm @ai-sdk/openai-compatible and "
        "options.baseURL and .apiKey",
        model="-m NAME/default",
        smaller="set limit.context and limit.output of the model in its configuration",
        quieter='set "agent": {"title": {"disable": true}}, or give --title',
        longer='set "compaction": {"auto": false}',
    ),
    Coder(
        name="Qwen Code",
        commands=("qwen",),
        clients=("QwenCode",),
        address="start it with --auth-type openai, and set OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL=default",
        model="OPENAI_MODEL=default",
        smaller="set tools.exclude, and memory.enableManagedAutoMemory to false, in settings.json",
    ),
    Coder(
        name="mini-swe-agent",
        commands=("mini", "mini-swe-agent"),
        clients=("mini-swe-agent",),
        address="set OPENAI_BASE_URL and OPENAI_API_KEY, and start it with -m openai/default",
        model="-m openai/default",
        smaller="give its model model_kwargs.max_tokens; it never shortens its history",
    ),
    Coder(
        name="OpenHands",
        commands=("openhands",),
        clients=("OpenHands",),
        address="give its LLM model='openai/default', base_url and api_key",
        model="LLM(model='openai/default')",
        smaller="give it fewer tools",
    ),
)
_TITLES = (ForkReason.OTHER_AGENT,)
_SHORTENED = (ForkReason.COMPACTED, ForkReason.SUMMARY)


def of(session: Session) -> Coder | None:
    """The coding agent of a session, recognised by its calls' User-Agent, else by the command."""
    clients = [call.client for call in session.calls if call.client]
    clients += [refusal["client"] for refusal in session.refusals if refusal.get("client")]
    for coder in CODERS:
        if any(client.startswith(coder.clients) for client in clients):
            return coder
    words = {PurePath(word).name for word in (session.command or "").split()}
    return next((coder for coder in CODERS if words & set(coder.commands)), None)


def lines(session: Session, forks: Sequence[ForkReason | None]) -> list[str]:
    """The settings that fix a session's problems, for its coding agent."""
    coder = of(session)
    if coder is None:
        return []
    refused = {refusal["code"] for refusal in session.refusals}
    todo = [
        (not session.calls and not refused, coder.address),
        ("model_not_found" in refused, coder.model),
        ("context_length_exceeded" in refused, coder.smaller),
        (any(reason in _TITLES for reason in forks), coder.quieter),
        (any(reason in _SHORTENED for reason in forks), coder.longer),
    ]
    found = list(dict.fromkeys(switch for wanted, switch in todo if wanted and switch is not None))
    return [f"{coder.name}: {switch}" for switch in found]

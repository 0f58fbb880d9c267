"""How each coding program is called: its command, the variables it reads, and the files it needs in its home.

In all of them `{prompt}`, `{url}` (without `/v1`), `{key}` and `{home}` are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.errors import UserError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class CodingProgram:
    """A program that works in its current folder, and ends when it is done."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    home: Mapping[str, str] = field(default_factory=dict)
    """Files by their path in the home folder."""


CODEX_CONFIG = """
model = "default"
model_provider = "agentrl"
model_context_window = 32768
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.agentrl]
name = "agentrl"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
supports_websockets = false
"""
PROGRAMS = {
    "claude": CodingProgram(
        command=["claude", "-p", "{prompt}", "--bare", "--tools", "Bash", "--dangerously-skip-permissions"],
        env={
            "IS_SANDBOX": "1",
            "CLAUDE_CONFIG_DIR": "{home}/.claude",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_DISABLE_THINKING": "1",
        },
    ),
    "codex": CodingProgram(
        command=[
            "codex",
            "exec",
            "--skip-git-repo-check",
            "--ephemeral",
            "--dangerously-bypass-approvals-and-sandbox",
            *("--disable", "plugins", "--disable", "apps"),
            "{prompt}",
        ],
        env={"CODEX_HOME": "{home}/.codex"},
        home={".codex/config.toml": CODEX_CONFIG},
    ),
    "mini": CodingProgram(
        command=[
            "mini",
            "-y",
            "--exit-immediately",
            "-m",
            "openai/default",
            "-t",
            "{prompt}",
            "-o",
            "{home}/mini.json",
        ],
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
}
"""Claude Code with its shell alone, which needs the shortest prompts; Codex; mini-swe-agent."""


def program_of(given: str | Sequence[str]) -> CodingProgram:
    """The program of this name, or a command of one's own. Raises UserError."""
    if not isinstance(given, str):
        return CodingProgram(command=[str(word) for word in given])
    if given not in PROGRAMS:
        raise UserError(
            f"agent_args.program: there is no program {given!r}{did_you_mean(given, PROGRAMS)}; for another"
            " one give its command as a list, with {prompt}"
        )
    return PROGRAMS[given]

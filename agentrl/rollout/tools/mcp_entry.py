"""An MCP server in a list of tools: `{mcp: [COMMAND, …]}` or `{mcp: https://HOST/mcp}`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from agentrl.configs.config_files import validated
from agentrl.configs.section import Seconds, Section, plain_address
from agentrl.domain.schemas import Json
from agentrl.errors import ConfigError, UserError

PLACE = re.compile(r"\{(folder|task\.(\w+))\}")
FOLDER = "folder"


class McpEntry(Section):
    """A server, and which of its tools the model may use."""

    mcp: str | Annotated[list[str], Field(min_length=1)]
    """The URL of a server (streamable HTTP), or the command that starts one (stdio)."""
    shared: bool = False
    """One server for all episodes of a process; else one for each episode."""
    name: str = "mcp"
    """The server's name in messages."""
    only: list[str] | None = None
    """The tools that the model may use, by the server's names; null: all."""
    prefix: str = ""
    """Prefix of the names of the tools."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the command. It inherits PATH, HOME and the like, nothing else."""
    env_from: list[str] = Field(default_factory=list)
    """Variables that the command inherits from the worker."""
    cwd: str | None = None
    """The command's working directory; null: the worker's."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every HTTP request."""
    headers_env: dict[str, str] = Field(default_factory=dict)
    """Headers whose values are in variables of the worker: `{Authorization: VARIABLE}`."""
    start_timeout_s: Annotated[Seconds, Field(le=600)] = 60.0
    """How long the server may take to start and to list its tools."""

    @model_validator(mode="after")
    def _fits(self) -> McpEntry:
        of_command, of_url = (self.env, self.env_from, self.cwd), (self.headers, self.headers_env)
        if isinstance(self.mcp, str):
            plain_address(self.mcp)
            if any(of_command):
                raise ValueError("`env`, `env_from` and `cwd` are for commands")
        elif any(of_url):
            raise ValueError("`headers` and `headers_env` are for URLs")
        if self.shared and any(map(PLACE.search, self._texts())):
            raise ValueError("a shared server has no {folder} and no {task.…}")
        return self

    def _texts(self) -> list[str]:
        command = [] if isinstance(self.mcp, str) else self.mcp
        return [*command, *self.env.values(), self.cwd or ""]

    @property
    def needs_folder(self) -> bool:
        """Whether each episode needs an empty folder of its own."""
        return any(f"{{{FOLDER}}}" in text for text in self._texts())

    def command(self, task: Json, folder: str) -> tuple[list[str], dict[str, str], str | None]:
        """The command, its own variables and its working directory, for an episode. Raises UserError."""
        assert not isinstance(self.mcp, str)
        inherited = {name: self._variable(name) for name in self.env_from}
        env = inherited | {name: filled(text, task, folder) for name, text in self.env.items()}
        argv = [filled(text, task, folder) for text in self.mcp]
        return argv, env, None if self.cwd is None else filled(self.cwd, task, folder)

    def all_headers(self) -> dict[str, str]:
        """The headers, with those of variables. Raises UserError."""
        return self.headers | {header: self._variable(name) for header, name in self.headers_env.items()}

    def _variable(self, name: str) -> str:
        if name not in os.environ:
            raise UserError(f"mcp server {self.name}: the variable {name} is not set")
        return os.environ[name]


def mcp_entry(values: Mapping[str, Any], at: str) -> McpEntry:
    """Read an entry. Raises UserError."""
    try:
        return validated(dict(values), McpEntry)
    except ConfigError as error:
        raise UserError(f"{at}: {str(error).replace('config key ', '')}") from None


def filled(text: str, task: Json, folder: str) -> str:
    """A text with `{folder}` and `{task.FIELD}` replaced. Raises UserError for a field that the task does not have."""

    def value(found: re.Match[str]) -> str:
        if found[1] == FOLDER:
            return folder
        if found[2] not in task:
            raise UserError(f"tools: the task has no field {found[2]!r}, which an MCP server needs")
        return str(task[found[2]])

    return PLACE.sub(value, text)

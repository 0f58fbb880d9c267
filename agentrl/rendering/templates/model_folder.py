"""Reads a model folder's tokenizer, configuration and chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.domain.schemas import Json
from agentrl.errors import ModelFolderError
from agentrl.rendering.templates.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The files for rendering a model. `special_tokens` maps `eos_token` and others to their text."""

    path: Path
    config: Json
    tokenizer_config: Json
    generation_config: Json
    special_tokens: dict[str, str]
    template: ChatTemplate | None
    renderer: str | None  # from renderer.json: {"renderer": "qwen3"}

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding. Ids beyond it crash an engine."""
        return self._text_config.get("vocab_size")

    @property
    def max_context(self) -> int | None:
        """Maximum context length of the model's positions."""
        return self._text_config.get("max_position_embeddings")

    @property
    def eos_token_ids(self) -> list[int]:
        """All ids that end generation according to the folder."""
        found = self.generation_config.get("eos_token_id", self._text_config.get("eos_token_id"))
        return found if isinstance(found, list) else [] if found is None else [found]

    def tokenizer(self) -> Tokenizer:
        """A new tokenizer, since renderers change its settings."""
        return Tokenizer.from_file(str(self.path / "tokenizer.json"))

    @property
    def _text_config(self) -> Json:
        text: Json = self.config.get("text_config") or {}
        return self.config | text


def read_folder(path: Path) -> ModelFolder:
    """Read the small files of a model folder. Raises ModelFolderError naming a missing or invalid one."""
    if not (path / "tokenizer.json").is_file():
        raise ModelFolderError(f"model folder {path} has no tokenizer.json")
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(path / "special_tokens_map.json") | tokenizer_config)
    source = _template_source(path, tokenizer_config)
    renderer = _read_json(path / "renderer.json").get("renderer")
    return ModelFolder(
        path=path,
        config=_read_json(path / "config.json"),
        tokenizer_config=tokenizer_config,
        generation_config=_read_json(path / "generation_config.json"),
        special_tokens=special_tokens,
        template=None if source is None else ChatTemplate(source, special_tokens),
        renderer=renderer,
    )


def _read_json(path: Path) -> Json:
    try:
        data: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelFolderError(f"{path} must hold an object, got {type(data).__name__}")
    return data


def _special_tokens(config: Json) -> dict[str, str]:
    texts = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and not key.startswith("add_")
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _template_source(path: Path, tokenizer_config: Json) -> str | None:
    """The chat template, from its own file or a configuration key; the default of several."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    source = tokenizer_config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source

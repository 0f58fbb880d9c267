"""Reads conversations and pairs from a JSONL or Parquet file.

    SFT    {"messages": [...], "tools": [...]?}                          trains every assistant message
           {"prompt": [...], "completion": [...], "tools": [...]?}       trains those of the completion
           {"input_ids": [...], "loss_mask": [...]}                      tokens as `agentrl export` writes them
    pairs  {"prompt": [...], "chosen": [...], "rejected": [...], "tools": [...]?}
           {"chosen": [...], "rejected": [...]}                          the common first messages are the prompt

Messages have OpenAI's format. A string in place of messages is one message: the user's in `prompt`, otherwise the
assistant's. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.rendering import Renderer
from agentrl.trainer.packing import Sample
from agentrl.trainer.tuning.encoding import encode
from agentrl.trainer.tuning.items import Item, make_sample, pair


def read(path: Path, make: Callable[[Json, str], Item | None]) -> Iterator[Item | None]:
    """Yield `make(row, name)` for every row. Raises UserError that names file, row and field."""
    for number, row in enumerate(_rows(path), 1):
        try:
            yield make(row, str(number))
        except UserError as error:
            raise UserError(f"data.file: {path}, row {number}: {error}") from None


def conversation(renderer: Renderer, row: Json, name: str) -> Item:
    """An item of SFT from one row."""
    if row.get("input_ids") is not None:
        return _tokens(row, name)
    if row.get("messages") is not None:
        return encode(renderer, _messages(row, "messages"), _tools(row), name=name)
    if row.get("completion") is None:
        raise UserError(f"needs messages, or prompt and completion; it has {', '.join(row) or 'nothing'}")
    prompt, completion = _messages(row, "prompt", "user"), _messages(row, "completion", "assistant")
    return encode(renderer, prompt + completion, _tools(row), first=len(prompt), name=name)


def _tokens(row: Json, name: str) -> Item:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(mask, list) or not isinstance(ids, list) or len(ids) != len(mask):
        raise UserError("loss_mask: must be a list as long as input_ids")
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise UserError("input_ids: must be token ids")
    if not any(mask) or mask[0]:
        raise UserError("loss_mask: must select a token, and not the first, which has no context to predict it")
    return [make_sample(ids, [bool(m) for m in mask], group=name, name=name)]


def preference(renderer: Renderer, row: Json, name: str) -> Item | None:
    """A pair from one row; None when the two answers are the same."""
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            raise UserError(f"needs {key}; it has {', '.join(row) or 'nothing'}")
    chosen, rejected = (_messages(row, key, "assistant") for key in ("chosen", "rejected"))
    if row.get("prompt") is not None:
        prompt = _messages(row, "prompt", "user")
        chosen, rejected = prompt + chosen, prompt + rejected
        first = len(prompt)
    else:
        shared = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
        first = next(shared, min(len(chosen), len(rejected)))
    if chosen == rejected:
        return None
    preferred = _only(renderer, row, "chosen", chosen, first, name)
    return pair(preferred, _only(renderer, row, "rejected", rejected, first, name), name)


def _only(renderer: Renderer, row: Json, key: str, messages: list[Json], first: int, name: str) -> Sample:
    """The single sample of one side of a pair."""
    try:
        samples = encode(renderer, messages, _tools(row), first=first, name=f"{name}.{key}")
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    if len(samples) > 1:
        raise UserError(f"{key}: the chat format rewrites earlier turns of this answer: give a pair for each turn")
    return samples[0]


def _messages(row: Json, key: str, role: str | None = None) -> list[Json]:
    value = row.get(key)
    if isinstance(value, str) and value.lstrip().startswith("[{"):  # as in a column of exported JSON
        value = _parsed(value, key)
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UserError(
            f"{key}: must be a list of messages, got {'nothing' if value is None else type(value).__name__}"
        )
    return value


def _tools(row: Json) -> list[Json] | None:
    value = row.get("tools")
    tools: list[Json] | None = _parsed(value, "tools") if isinstance(value, str) else value
    return tools or None


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{key}: is not valid JSON: {error}") from None


def _rows(path: Path) -> Iterator[Json]:
    if not path.is_file():
        raise UserError(f"data.file: {path} does not exist")
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        yield from _jsonl(path)
    else:
        raise UserError(f"data.file: {path} ends neither in .jsonl nor in .parquet")


def _jsonl(path: Path) -> Iterator[Json]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"data.file: {path}, line {number} is not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"data.file: {path}, line {number} must be an object, got {type(row).__name__}")
            yield row


def _parquet(path: Path) -> Iterator[Json]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise UserError("data.file: Parquet needs pyarrow: pip install 'agentrl[export]', or give JSONL") from error
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise UserError(f"data.file: {path} is not a Parquet file: {error}") from None

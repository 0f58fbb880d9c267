"""Loads the items that a configuration names: a file through the model's renderer, or trajectories of the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from agentrl import location
from agentrl.configs.tuning_config import AnyConfig, PairDataConfig, SftConfig, SftDataConfig
from agentrl.domain.schemas import Json
from agentrl.errors import UserError
from agentrl.models.same_tokens import check_same_tokens
from agentrl.rendering import Renderer, load_renderer
from agentrl.rendering.templates.model_folder import read_folder
from agentrl.store import Database
from agentrl.trainer.tuning import data_files, recorded, upstream_items
from agentrl.trainer.tuning.items import Data, Item, split


def load_data(config: AnyConfig, model: Path) -> Data:
    """The items of a configuration, in a fixed order. Raises UserError that names what is wrong with the data."""
    data, notes = config.data, list[str]()
    if isinstance(data, SftDataConfig) and data.upstream is not None:
        read: list[Item | None] = [*_from_upstream(config, data, model, notes)]
    else:
        read = list(_from_file(config, model) if data.file else _from_run(config, model))
    found = [item for item in read if item is not None]
    if len(found) < len(read):
        notes.append(f"left out {len(read) - len(found)} pairs of two equal answers")
    folder = read_folder(model)
    _check_vocabulary(found, folder.vocab_size)
    limit = data.max_tokens or folder.max_context
    items = [item for item in found if limit is None or _longest(item) <= limit]
    if len(items) < len(found):
        notes.append(f"left out {len(found) - len(items)} items of more than {limit} tokens")
    return split(items, data.held_out, config.seed, notes)


def _from_file(config: AnyConfig, model: Path) -> Iterator[Item | None]:
    renderer = load_renderer(model)
    make: Callable[[Renderer, Json, str], Item | None]
    make = data_files.conversation if isinstance(config.data, SftDataConfig) else data_files.preference
    assert config.data.file is not None
    return data_files.read(config.data.file, partial(make, renderer))


def _from_run(config: AnyConfig, model: Path) -> list[Item]:
    data = config.data
    where = location.locate(data.run, data.database_url, os.environ, config.runs_dir)
    database = Database(where.database_url)
    try:
        database.require_current()
        named = data.model_copy(update={"run": where.name})
        _check_tokens(model, Path(recorded.base_model(database, named)))
        found = recorded.read(database, named)
        compares = isinstance(config, SftConfig) and config.loss == "forward_kl"
        known = recorded.distributions(database, found) if compares else {}
    finally:
        database.close()
    if compares and not known:
        raise UserError(
            f"loss: forward_kl: run {where.name!r} has recorded no distributions: record them with "
            "rollout.top_logprobs, or use cross_entropy"
        )
    if isinstance(data, PairDataConfig):
        return recorded.pairs(found, data)
    return recorded.conversations(found, data, known)


def _from_upstream(config: AnyConfig, data: SftDataConfig, model: Path, notes: list[str]) -> list[Item]:
    where = location.locate(data.run, data.database_url, os.environ, config.runs_dir)
    database = Database(where.database_url)
    try:
        database.require_current()
        found = recorded.upstream_answers(database, data.model_copy(update={"run": where.name}))
    finally:
        database.close()
    return upstream_items.items(load_renderer(model), found, data, notes)


def _check_tokens(model: Path, sampled_by: Path) -> None:
    """Raise ModelFolderError for a run of a model with other tokens, where its folder is on this machine."""
    if all((folder / "tokenizer.json").is_file() for folder in (model, sampled_by)):
        check_same_tokens(model, sampled_by, "data.run")


def _check_vocabulary(items: list[Item], size: int | None) -> None:
    largest = max((int(sample.tokens.input_ids.max()) for item in items for sample in item), default=0)
    if size is not None and largest >= size:
        raise UserError(
            f"data: token id {largest} is not in the model's vocabulary of {size}: are the data for another model?"
        )


def _longest(item: Item) -> int:
    return max(len(sample.tokens.input_ids) for sample in item)

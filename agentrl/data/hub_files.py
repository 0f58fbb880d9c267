"""Datasets of the Hugging Face hub: `hf://OWNER/NAME/CONFIG:SPLIT`.

The hub keeps public datasets as Parquet too, on the branch `refs/convert/parquet`, in folders `CONFIG/SPLIT`. Files
are downloaded into the cache of `huggingface_hub` (`HF_HOME`), one after the other as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from httpx import HTTPError

from agentrl.errors import UserError, did_you_mean

SCHEME = "hf://"
BRANCH = "refs/convert/parquet"
NAME = re.compile(r"^hf://([\w.-]+/[\w.-]+)(?:/([\w.-]+))?:([\w.-]+)$", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a dataset at one commit of the hub."""

    repository: str
    revision: str
    files: tuple[str, ...]

    def downloaded(self, field: str) -> Iterator[tuple[str, Path]]:
        """Download the files one by one; yields each with its name. Raises UserError."""
        hub = _hub()
        for file in self.files:
            name = f"{SCHEME}{self.repository}/{file}"
            try:
                path = hub.hf_hub_download(self.repository, file, repo_type="dataset", revision=self.revision)
            except (OSError, ValueError, HTTPError) as error:
                raise UserError(f"{field}: cannot download {name}: {_line(error)}") from error
            yield name, Path(path)


def find_split(spec: str, field: str) -> HubSplit:
    """Look a dataset's split up. Raises UserError with the configurations and splits that there are."""
    match = NAME.match(spec)
    if match is None:
        raise UserError(f"{field}: {spec!r} must look like hf://OWNER/NAME/CONFIG:SPLIT or hf://OWNER/NAME:SPLIT")
    repository, config, split = match.groups()
    try:
        info = _hub().HfApi().dataset_info(repository, revision=BRANCH)
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(f"{field}: the hub has no Parquet files of {repository}: {_line(error)}") from error
    folders: dict[tuple[str, str], list[str]] = {}
    for one in info.siblings or ():
        parts = PurePosixPath(one.rfilename).parts
        if len(parts) == 3 and parts[2].endswith(".parquet"):
            folders.setdefault((parts[0], parts[1]), []).append(one.rfilename)
    configs = sorted({name for name, _ in folders})
    if config is None:
        if len(configs) != 1:
            raise UserError(f"{field}: {repository} has the configurations {', '.join(configs) or '(none)'}: name one")
        config = configs[0]
    files = folders.get((config, split))
    if not files:
        known = [f"{one}:{of}" for one, of in folders]
        raise UserError(f"{field}: {repository} has no {config}:{split}{did_you_mean(f'{config}:{split}', known)}")
    return HubSplit(repository, str(info.sha), tuple(sorted(files)))


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError("hf:// needs huggingface_hub: pip install 'agentrl[data]'") from error
    return huggingface_hub


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

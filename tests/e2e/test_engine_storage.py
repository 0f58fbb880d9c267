"""A real engine on a host without the run's folder loads a version from a real S3 server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import s3fs
from s3_server import S3Server
from serving import ENGINE_KEY, serving

from agentrl.configs.publish_config import StorageConfig
from agentrl.engine.server_process import Server
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.engine.stored_weights import StoredWeights
from agentrl.errors import EngineRejected
from agentrl.storage import stored_folders
from agentrl.storage.object_store import ObjectStore
from agentrl.versions.weights_folder import TENSORS

pytestmark = [pytest.mark.engine, pytest.mark.long]
NAME, URL = "v3-01a2", "s3://bucket/run/weights"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
    yield server
    server.stop()


@pytest.fixture
def engine(storage: S3Server, tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    weights = StoredWeights(url=URL, storage=StorageConfig(cache_dir=tmp_path / "cache"))
    with serving(tiny_model, tmp_path / "engine.log", key=ENGINE_KEY, stored_weights=weights) as server:
        yield server


async def test_a_version_is_loaded_from_the_storage(engine: Server, tiny_model: Path, tmp_path: Path) -> None:
    version = tmp_path / NAME
    version.mkdir()
    shutil.copy(tiny_model / TENSORS, version)
    shutil.copy(tiny_model / "config.json", version)
    async with aiohttp.ClientSession() as http:
        client = SGLangClient(engine.url, http, key=ENGINE_KEY)
        with pytest.raises(EngineRejected, match=f"has no folder of {NAME}, and: {URL}/{NAME} has no MANIFEST"):
            await client.update_weights_from_disk(f"/not/here/{NAME}", 3)
        stored_folders.upload(ObjectStore(URL), version, NAME)
        await client.update_weights_from_disk(f"/not/here/{NAME}", 3)
        assert (await client.model_info()).version == "3"
        chunks = [
            chunk
            async for chunk in client.generate(rid="r" * 32, input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
        ]
        assert chunks[-1].finish_reason is not None

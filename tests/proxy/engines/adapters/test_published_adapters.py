"""Adapters that are published through a proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import add_version


@pytest.fixture
def run_config(run_config: dict[str, Any]) -> dict[str, Any]:
    run_config["trainer"]["lora"] = {"rank": 4, "publish": "adapter"}
    return run_config


def write(folder: Path, value: float) -> str:
    """An adapter's folder, and its checksum."""
    import numpy as np
    from safetensors.numpy import save_file

    from agentrl.versions import weights_folder

    folder.mkdir(exist_ok=True)
    save_file({"a": np.full(3, value, np.float32)}, folder / weights_folder.ADAPTER)
    return weights_folder.checksum(folder / weights_folder.ADAPTER)


def test_a_published_adapter_is_recorded_with_each_call(proxy: Any, tmp_path: Path) -> None:
    admin = {"Authorization": "Bearer admin-key"}
    for version in (1, 2):
        folder = tmp_path / f"v{version}-s"
        add_version(proxy.database, proxy.run_id, version, folder, write(folder, version))
        assert proxy.post("/admin/publish", {"version": version}, headers=admin).status_code == 200
        session = proxy.session()
        proxy.engine.enqueue(proxy.says("ab"))
        asked = {"messages": [{"role": "user", "content": "one"}]}
        proxy.post(f"/sessions/{session['session_id']}/v1/chat/completions", asked).raise_for_status()
        (call,) = proxy.calls(session)
        assert [span[0] for span in call["version_spans"]] == [version]
        assert proxy.engine.requests[-1]["lora_path"] == folder.name
    assert "/pause_generation" not in [path for path, _ in proxy.engine.calls]
    assert proxy.get("/api/engines")[0]["version"] == 2


def test_an_adapter_that_was_exchanged_is_not_loaded(proxy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "v1-s"
    add_version(proxy.database, proxy.run_id, 1, folder, write(folder, 1.0))
    write(folder, 2.0)
    refused = proxy.post("/admin/publish", {"version": 1}, headers={"Authorization": "Bearer admin-key"})
    assert refused.status_code == 503
    assert "adapter_model.safetensors are not those that the trainer recorded" in refused.text
    assert proxy.engine.adapters == {}
    assert proxy.get("/api/engines")[0]["state"] == "serving"


def test_a_publish_that_no_engine_took_names_the_reason(proxy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "v1-s"
    add_version(proxy.database, proxy.run_id, 1, folder, write(folder, 1.0))
    proxy.engine.fail_next_update = "the disk is away"
    refused = proxy.post("/admin/publish", {"version": 1}, headers={"Authorization": "Bearer admin-key"})
    assert refused.status_code == 503
    assert "no engine took version 1: " in refused.text
    assert "the disk is away" in refused.text

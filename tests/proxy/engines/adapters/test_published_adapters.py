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


LAYER = "model.layers.0.self_attn.o_proj"


def write(folder: Path, value: float, into: int | None = None) -> str:
    """An adapter's folder, and its checksum. `into` is the number of columns of another model's layer."""
    import numpy as np
    from safetensors.numpy import save_file

    from agentrl.models import resolve_model
    from agentrl.versions import weights_folder

    out, columns = weights_folder.tensor_entries(resolve_model("tiny"))[f"{LAYER}.weight"].shape
    a, b = np.full((4, into or columns), value, np.float32), np.full((out, 4), value, np.float32)
    folder.mkdir(exist_ok=True)
    tensors = {f"base_model.model.{LAYER}.lora_A.weight": a, f"base_model.model.{LAYER}.lora_B.weight": b}
    save_file(tensors, folder / weights_folder.ADAPTER)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
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


def test_an_adapter_of_another_model_is_not_loaded(proxy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "v1-s"
    add_version(proxy.database, proxy.run_id, 1, folder, write(folder, 1.0, into=7))
    refused = proxy.post("/admin/publish", {"version": 1}, headers={"Authorization": "Bearer admin-key"})
    assert refused.status_code == 503
    assert "version 1 is not loaded: it does not fit the base model" in refused.text
    assert "/load_lora_adapter" not in [path for path, _ in proxy.engine.calls]
    assert proxy.get("/api/engines")[0]["state"] == "serving"


def test_a_publish_that_no_engine_took_names_the_reason(proxy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "v1-s"
    add_version(proxy.database, proxy.run_id, 1, folder, write(folder, 1.0))
    proxy.engine.fail_next_update = "the disk is away"
    refused = proxy.post("/admin/publish", {"version": 1}, headers={"Authorization": "Bearer admin-key"})
    assert refused.status_code == 503
    assert "no engine took version 1: " in refused.text
    assert "the disk is away" in refused.text

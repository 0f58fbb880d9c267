"""The source of the user's code: recorded when a run is created, and again when a resume finds another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.errors import UserError
from agentrl.launch import code_facts, create
from agentrl.store import Database, events, runs

CONFIG = {
    "name": "r",
    "model": "tiny",
    "reward": {"components": {"vowels": {"function": "shapes_scored:vowels"}, "same": {"function": "exact"}}},
    "rollout": {"accept": "shapes_kept:varied"},
    "trainer": {"algorithm": {"advantage": "shapes_kept:plain"}},
    "tasks": "shapes_scored:tasks",
}


def test_a_changed_source_is_named_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db: Database) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "shapes_kept", raising=False)
    (tmp_path / "shapes_scored.py").write_text("def vowels(completion): return 0\n")
    kept = tmp_path / "shapes_kept.py"
    kept.write_text("def varied(task, rewards): return True\ndef plain(trajectories, algorithm): return []\n")
    config = parse_config(CONFIG)
    code_facts.check_functions(config)
    facts = code_facts.facts_of(config)
    assert sorted(facts) == ["reward.same", "reward.vowels", "rollout.accept", "trainer.algorithm.advantage"]
    assert all(len(fact["sha256"]) == 64 for fact in facts.values())
    run_id = db.transact(lambda conn: runs.create(conn, name="r", config={}, base_model="m", key="k", seed=0, steps=1))
    assert db.transact(code_facts.record, run_id, facts) == []
    assert db.transact(code_facts.record, run_id, facts) == []

    kept.write_text(kept.read_text() + "# another\n")
    changed = code_facts.facts_of(config)
    lines = db.transact(code_facts.record, run_id, changed)
    assert [line.split(":")[1].strip() for line in lines] == ["rollout.accept", "trainer.algorithm.advantage"]
    assert "the run goes on with the new source" in lines[0]
    assert db.transact(code_facts.record, run_id, changed) == []
    first, second = db.query(events.of_run, run_id, code_facts.CODE)
    assert (first.data["keys"], first.data["changed"]) == (facts, [])
    assert second.data["changed"] == ["rollout.accept", "trainer.algorithm.advantage"]


def test_a_run_with_a_bad_function_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "losses_of_mine.py").write_text("def reinforce(tokens, totals, algorithm): ...\n")
    config = {"name": "r", "model": "tiny", "trainer": {"algorithm": {"loss": "losses_of_mine:reinforc"}}}
    with pytest.raises(UserError, match="did you mean 'reinforce'"):
        create.create_run(parse_config(config), "key")
    assert not (tmp_path / "runs").exists()

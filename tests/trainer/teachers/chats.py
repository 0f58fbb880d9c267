"""A run whose calls have messages, rendered by the tiny model's ChatML, and a model folder that can read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from loop_setup import Setup
from proxy_stub import PublishStub, record_call
from run_records import create_run
from support import save_tiny_model

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import Json, SessionStatus
from agentrl.models import tiny
from agentrl.rendering import Renderer, load_renderer
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts, session_limits
from agentrl.store.sessions.ends import sealing
from agentrl.store.training import rewards, steps
from agentrl.trainer.stop import Stop

LIMITS = session_limits.Limits(
    group_size=2,
    min_group_size=2,
    max_concurrent_groups=100,
    max_staleness=10,
    groups_per_step=100,
    turn_discount=1.0,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=86400.0,
    heartbeat_timeout_s=60.0,
)
SYSTEM: Json = {"role": "system", "content": "Reverse."}


def model_folder(folder: Path, **sizes: int) -> Path:
    """A random Qwen2 with the byte tokenizer and its chat template."""
    tokenizer = tiny.make_tokenizer()
    save_tiny_model(folder, vocab_size=tokenizer.get_vocab_size(), **sizes)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny.tokenizer_config()))
    (folder / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE)
    return folder


class Chats(Setup):  # type: ignore[misc]
    """A run of one step of groups of two two-turn conversations; each task has a `word` and perhaps a `hint`."""

    database: Database
    config: RunConfig

    def __init__(self, folder: Path, model: Path, world: Any, tasks: list[Json], **changes: Any) -> None:
        super().__init__(folder, model, world, steps=1)
        self.database.close()
        self.database = Database(f"sqlite:///{folder}/chats.db")
        self.database.upgrade()
        self.renderer = load_renderer(model)
        with self.database.write() as conn:
            self.run_id = create_run(conn, task_data=tasks, steps=1)
        rng = np.random.default_rng(0)
        for _ in tasks:
            play(self.database, self.run_id, self.renderer, rng, **changes)
        trainer = self.config.trainer.model_copy(update={"groups_per_step": len(tasks), "train_layers": None})
        self.config = self.config.model_copy(update={"trainer": trainer})
        self.stop, self.proxy = Stop(), PublishStub(self.database, self.run_id)

    @property
    def batch(self) -> Any:
        """The batch that the step leased."""
        (step,) = self.database.query(steps.of_run, self.run_id)
        return self.database.query(steps.batch, step.id)


def asks(word: str) -> list[Json]:
    """The first messages about a task."""
    return [SYSTEM, {"role": "user", "content": word}]


def play(
    database: Database,
    run_id: str,
    renderer: Renderer,
    rng: np.random.Generator,
    *,
    opening: tuple[int, ...] = (),
    completion: bool = False,
    options: bool = False,
) -> None:
    """One group. `opening`: a forced beginning of each first answer; `completion`: calls without messages; `options`:
    prompts that are not those of their messages.
    """
    with database.write() as conn:
        new = group_starts.start_group(conn, run_id, LIMITS, [codec.new_id() for _ in range(2)])
        assert new.task is not None
        word = new.task["word"]
        for value, session_id in enumerate(new.session_ids):
            prompt = [*([9] * options), *renderer.render(asks(word), None), *opening]
            said = [] if completion else asks(word)[1:]
            first, ids = call(conn, run_id, session_id, None, [], prompt, said, rng)
            more = [{"role": "user", "content": "again"}]
            after = renderer.bridge(ids, more, None, messages_before=asks(word)).delta_ids or [5, 6, 7]
            call(conn, run_id, session_id, first, ids, after, more, rng)
            rewards.add(conn, session_id, value=float(value), discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, LIMITS)


def call(
    conn: Any, run_id: str, session_id: str, parent: Any, before: list[int], delta: list[int], said: Any, rng: Any
) -> tuple[str, list[int]]:
    """A call that follows `before` and ends its answer; with `said`, the conversation has a system message."""
    output = [*rng.integers(40, 200, 5).tolist(), tiny.IM_END]
    system, answer = (SYSTEM if said else None), {"role": "assistant", "content": "x"}
    return record_call(
        conn, run_id, session_id, parent, before, delta, output, rng, system=system, said=said, answer=answer
    )

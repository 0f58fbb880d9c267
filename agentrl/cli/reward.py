"""`agentrl store reward`: a person's judgement of a session or a call, straight into the database."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any

import typer

from agentrl.cli.located import DatabaseUrl, Run, opened
from agentrl.visible import say


def reward(
    session: Annotated[str, typer.Option(help="The session's id.")],
    value: Annotated[float, typer.Option(help="A finite number.")],
    call: Annotated[str | None, typer.Option(help="Id of one model call; without it the session is rewarded.")] = None,
    scope: Annotated[str | None, typer.Option(help="session, call, or branch: the path to the call.")] = None,
    name: Annotated[str, typer.Option(help="Names add up; a later value of the same name supersedes.")] = "reward",
    source: Annotated[str, typer.Option(help="Who says so.")] = "human",
    key: Annotated[str | None, typer.Option(help="Idempotency key: repeated, it counts once.")] = None,
    run: Run = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Reward a session or one of its calls, as the REST API does. Works while the run is on, and hours later.

    Prints JSON; `applied` is false when it came too late to be trained on. It is kept all the same.
    """
    from agentrl.configs.run_config import RunConfig
    from agentrl.errors import RequestError
    from agentrl.store import runs
    from agentrl.store.sessions import session_limits, session_lookup
    from agentrl.store.sessions.ends import session_rewards
    from agentrl.store.training.rewards import RewardAnswer

    def unit(conn: Any, repeat_key: str) -> RewardAnswer:
        run_id = session_lookup.run_of(conn, session)
        if run_id is None:
            raise RequestError(404, f"no session {session!r}", code="session_not_found")
        limits = session_limits.Limits.of(RunConfig.model_validate(runs.get(conn, run_id).config))
        return session_rewards.reward(
            conn,
            session,
            limits,
            value=value,
            interaction_id=call,
            scope=scope,
            name=name,
            source=source,
            idempotency_key=repeat_key,
        )

    with opened(run, database_url) as store:
        answer = store.database.transact(unit, key or uuid.uuid4().hex)
    say(json.dumps({"reward_id": answer.reward_id, "applied": answer.applied}))

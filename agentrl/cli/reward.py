"""`agentrl store reward`: writes a reward for a session or a call to the database."""

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
    call: Annotated[str | None, typer.Option(help="Id of a model call; default: reward the session.")] = None,
    scope: Annotated[
        str | None, typer.Option(help="session, call, or branch (the calls on the path to --call).")
    ] = None,
    name: Annotated[
        str, typer.Option(help="Rewards of different names add up; the last one of a name counts.")
    ] = "reward",
    source: Annotated[str, typer.Option(help="Origin of the reward.")] = "human",
    key: Annotated[str | None, typer.Option(help="Idempotency key: repeated calls count once.")] = None,
    run: Run = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Reward a session or one of its calls, as the REST API does, during the run or later.

    Prints JSON. `applied` is false when the reward came too late for training; it is stored in any case.
    """
    from agentrl.configs.run_config import RunConfig
    from agentrl.errors import no_session
    from agentrl.store import runs
    from agentrl.store.sessions import session_limits, session_lookup
    from agentrl.store.sessions.ends import session_rewards
    from agentrl.store.training.rewards import RewardAnswer

    def unit(conn: Any, repeat_key: str) -> RewardAnswer:
        run_id = session_lookup.run_of(conn, session)
        if run_id is None:
            raise no_session(session)
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

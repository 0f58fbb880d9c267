"""Episodes that are played over HTTP, and a step that is trained on them."""

from agentrl.domain.schemas import TrainedBatch, TrainedTrajectory
from agentrl.store.training import steps, trainer_epochs

ADMIN = {"Authorization": "Bearer admin-key"}


def play(proxy, session, value=1.0, **end):
    """A whole rewarded episode."""
    proxy.sdk(session).chat.completions.create(model="test", messages=[{"role": "user", "content": "ab"}])
    path = f"/sessions/{session['session_id']}"
    assert proxy.post(f"{path}/reward", {"value": value}).status_code == 200
    return proxy.post(f"{path}/end", end).json()


def trained_version(proxy, tmp_path):
    """Two ready groups, leased and completed as version 1, not yet published."""
    for _ in range(2):
        for session in proxy.post("/groups").json()["sessions"]:
            play(proxy, session)
    with proxy.database.write() as conn:
        epoch = trainer_epochs.begin_epoch(conn, proxy.run_id)
        step_id = steps.lease(conn, proxy.run_id, epoch, step=1, n_groups=2, max_staleness=1, discount=1.0)
        batch = steps.batch(conn, step_id)
        facts = TrainedBatch(
            step_id=step_id,
            digest=batch.digest(),
            estimator="grpo",
            wasted_tokens=0,
            trained=[
                TrainedTrajectory(
                    trajectory_id=t.trajectory_id, advantage=0.5, staleness_max=0, staleness_mean=0.0, tokens_trained=4
                )
                for t in batch.trajectories
            ],
        )
        steps.complete(
            conn, proxy.run_id, epoch, facts, metrics={"loss": 0.5}, version=1, path=str(tmp_path), checksum="c"
        )

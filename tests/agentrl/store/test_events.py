"""Events of a run."""

from agentrl.store import events


def test_an_event_with_a_name_is_stored_once(db, run_id):
    for _ in range(2):
        db.transact(events.record, run_id, "train_step", {"step": 1}, "trainer", "0" * 32)
    db.transact(events.record, run_id, "train_step", {"step": 2}, "trainer")
    assert [row.data["step"] for row in db.query(events.of_run, run_id, "train_step")] == [1, 2]

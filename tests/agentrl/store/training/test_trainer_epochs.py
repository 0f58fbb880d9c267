"""The epoch of a trainer."""

import pytest
from play import begin, finish, group, take

from agentrl.errors import FencedError


def test_an_old_trainer_is_fenced_everywhere(db, run_id, limits):
    group(db, run_id, limits)
    group(db, run_id, limits)
    old = begin(db, run_id)
    batch = take(db, run_id, old, 1)
    begin(db, run_id)
    with pytest.raises(FencedError):
        take(db, run_id, old, 1)
    with pytest.raises(FencedError):
        finish(db, run_id, old, batch)

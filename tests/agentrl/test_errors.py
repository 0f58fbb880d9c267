"""What is said about a wrong name."""

from agentrl.domain.schemas import RewardScope
from agentrl.errors import did_you_mean


def test_choices_are_shown_as_they_are_typed() -> None:
    assert did_you_mean("brnch", RewardScope) == "; did you mean 'branch'?"
    assert did_you_mean("xyz", RewardScope) == "; choose from branch, call, session"
    assert did_you_mean("xyz", []) == ""

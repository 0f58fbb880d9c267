"""When a version has files with all tensors, and when what changed."""

from __future__ import annotations

import pytest

from agentrl.configs.publish_config import PublishConfig
from agentrl.trainer.weights.delta_policy import Wanted, is_too_large, wanted

WHOLE, DELTA, BOTH = Wanted(), Wanted(whole=False, delta=True), Wanted(whole=True, delta=True)


@pytest.mark.parametrize(
    ("delta", "item_bytes", "prepares", "since_whole", "expected"),
    [
        ("auto", 2, True, None, BOTH),  # the first of a trainer
        ("auto", 2, True, 0, DELTA),
        ("auto", 2, True, 3, DELTA),
        ("auto", 2, True, 4, BOTH),  # the fifth
        ("auto", 4, True, 0, WHOLE),
        ("auto", 2, False, 0, WHOLE),
        ("always", 4, True, 0, DELTA),
        ("always", 2, False, 0, BOTH),
        ("never", 2, True, 0, WHOLE),
    ],
)
def test_the_files_of_the_next_version(
    delta: str, item_bytes: int, prepares: bool, since_whole: int | None, expected: Wanted
) -> None:
    config = PublishConfig(delta=delta, anchor_every=5)
    assert wanted(config, item_bytes, lambda: prepares, since_whole) == expected


@pytest.mark.parametrize(("delta", "item_bytes"), [("never", 2), ("auto", 4)])
def test_engines_are_not_asked_where_they_decide_nothing(delta: str, item_bytes: int) -> None:
    def asked() -> bool:
        raise AssertionError

    assert wanted(PublishConfig(delta=delta), item_bytes, asked, 0) == WHOLE


def test_a_delta_may_have_a_share_of_the_whole() -> None:
    config = PublishConfig(delta_above=0.25)
    assert not is_too_large(25, 100, config)
    assert is_too_large(26, 100, config)

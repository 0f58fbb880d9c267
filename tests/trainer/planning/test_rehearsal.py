"""The trainer's step on the fake accelerator: every feature passes, and tensors left on the CPU are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from apart import apart
from rehearsal import FEATURES, PLANTED, rehearse

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def answers(tiny_model: Path) -> dict[str, Any]:
    return apart(rehearse, tiny_model)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_keeps_its_tensors_on_the_device(feature: str, answers: dict[str, Any]) -> None:
    found = answers[feature]
    assert "failed" not in found, found["failed"]
    assert found["packed"]
    assert found["devices"] == (["cpu"] if feature == "offload" else ["gpu"])
    assert found["tokens"] > 0


@pytest.mark.parametrize("planted", PLANTED)
def test_a_tensor_left_on_the_cpu_is_found_with_its_place(planted: str, answers: dict[str, Any]) -> None:
    *_, place = PLANTED[planted]
    assert "on cpu" in answers[planted]
    assert "on gpu" in answers[planted]
    assert place in answers[planted]

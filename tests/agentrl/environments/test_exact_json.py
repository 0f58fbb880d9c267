"""What JSON has no form for comes back as it was."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from agentrl.environments.exact_json import decoded, encoded


@pytest.mark.parametrize(
    "value",
    [((1, 2), [3, (4,)]), {1: "a", (2, 3): None}, {"a": {"b": ({0: 1.5},)}}, {"__tuple__": [1]}, "x", None, True, 0.5],
)
def test_a_value_survives(value: Any) -> None:
    found = decoded(json.loads(json.dumps(encoded(value))))
    assert found == value
    assert repr(found) == repr(value)


def test_arrays_become_lists_and_other_objects_are_refused() -> None:
    assert encoded({"a": np.arange(3), "b": np.float64(0.5)}) == {"a": [0, 1, 2], "b": 0.5}
    with pytest.raises(TypeError, match="set has no form in JSON"):
        encoded({"a": {1, 2}})

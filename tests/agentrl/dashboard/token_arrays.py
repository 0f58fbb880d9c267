"""Reads the arrays of the token view's data, as `tokens.js` does."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


def arrays_of(path: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a trajectory by name."""
    return {
        name: np.frombuffer(base64.b64decode(found["base64"]), np.dtype(found["type"]).newbyteorder("<"))
        for name, found in path["arrays"].items()
    }

"""The newest SDK of OpenAI's has no parameter that nobody decided on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from parameters import LISTED, OF_OPENAI


@pytest.mark.long
@pytest.mark.parametrize("dialect", OF_OPENAI)
def test_every_parameter_of_the_newest_sdk_is_in_the_table(frameworks: Path, dialect: str) -> None:
    listed = subprocess.run([frameworks, "-c", LISTED], capture_output=True, text=True, check=True, timeout=60).stdout
    assert set(json.loads(listed)[dialect]) == set(OF_OPENAI[dialect]) - {"stream"}

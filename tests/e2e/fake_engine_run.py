"""`agentrl`, whose engines are fake: `python fake_engine_run.py train CONFIG …`, and one engine: `… --engine PORT`."""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import replace

from agentrl.domain.schemas import Json
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_spec import EngineSpec
from agentrl.environment import ENGINE_KEY
from agentrl.testing import FakeEngine

LETTERS, END = range(67, 93), 2
"""Ids of the tiny model."""
ENGINE = "--engine"


def answer(input_ids: list[int], sampling_params: Json) -> list[int]:
    """Random letters, so that rewards differ."""
    return [*random.choices(LETTERS, k=int(sampling_params["max_new_tokens"]) - 1), END]


def engine_argv(spec: EngineSpec) -> list[str]:
    """The command line of a fake engine, in the place of SGLang's."""
    return [sys.executable, __file__, ENGINE, str(spec.port)]


def start_fake_engines() -> None:
    """Let this process start fake engines in the place of SGLang."""
    BACKENDS["sglang"] = replace(BACKENDS["sglang"], argv=engine_argv)


def main() -> None:
    """Serve as an engine until a signal, or run agentrl."""
    if ENGINE in sys.argv:
        with FakeEngine(answer, key=os.environ[ENGINE_KEY], port=int(sys.argv[-1]), token_delay_s=0.02):
            signal.pause()
        return
    from agentrl.cli.main import main as agentrl

    start_fake_engines()
    agentrl()


if __name__ == "__main__":
    main()

"""Rounds of calls through variants that run side by side, of which one works at a time."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxied import cpu_s

from agentrl.engine.server_process import free_port
from peers import payload
from peers.variants import KEY, VARIANTS, Place, Variant, ended, start_engine, start_load, until_answering


@dataclass(frozen=True)
class Case:
    """One figure of a variant."""

    figure: str  # the part of its name before the variant
    in_flight: int
    stream: bool = False
    first: bool = False
    logprobs: bool | None = None
    delay_s: float = 0.0

    def named(self, variant: str) -> str:
        """The figure's whole name."""
        return f"{self.figure}/{variant}/c{self.in_flight}{'/stream' if self.stream else ''}"


class Bench:
    """The engine, the load generator and all variants, running side by side; one works at a time."""

    def __init__(self, folder: Path, model: Path, names: list[str]) -> None:
        self._folder = folder
        self._model = model
        self._names = names
        self._payload = folder / "payload.json"
        self._seed = 0
        self.variants: list[Variant] = []
        payload.write(model, self._payload)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start everything, and end it."""
        with ExitStack() as stack:
            self._engine_port = free_port()
            engine = f"http://127.0.0.1:{self._engine_port}"
            stack.enter_context(ended(start_engine(self._payload, self._engine_port)))
            until_answering(self._engine_port, None)
            self._load = stack.enter_context(ended(start_load(self._payload)))
            for name in self._names:
                place = Place(self._folder / name, engine, free_port(), self._model)
                place.folder.mkdir()
                variant = VARIANTS[name](place)
                if variant.process is not None:
                    stack.enter_context(ended(variant.process))
                self.variants.append(variant)
            for variant in self.variants:
                until_answering(variant.port, variant.process)
            yield

    def round(self, variant: Variant, case: Case, sessions: int, turns: int) -> tuple[float, dict[str, Any]]:
        """Run one round; returns (CPU seconds per call, the load generator's result).

        Raises SystemExit when a call failed.
        """
        self._post_delay(case.delay_s)
        self._seed += 1
        order = {
            "host": "127.0.0.1",
            "port": variant.port,
            "opens": variant.opens,
            "path": variant.path,
            "key": KEY,
            "in_flight": case.in_flight,
            "sessions": sessions,
            "turns": turns,
            "stream": case.stream,
            "first": case.first,
            "logprobs": case.logprobs,
            "ramp_s": case.delay_s,
            "seed": self._seed,
        }
        self._say(order)
        self._hear(variant)
        before = 0.0 if variant.process is None else cpu_s(variant.process.pid)
        self._say({})
        result = self._hear(variant)
        after = 0.0 if variant.process is None else cpu_s(variant.process.pid)
        return (after - before) / result["calls"], result

    def _post_delay(self, seconds: float) -> None:
        body = json.dumps({"s": seconds}).encode()
        urllib.request.urlopen(f"http://127.0.0.1:{self._engine_port}/delay", body, timeout=10).close()

    def _say(self, line: dict[str, Any]) -> None:
        assert self._load.stdin is not None
        self._load.stdin.write(json.dumps(line).encode() + b"\n")
        self._load.stdin.flush()

    def _hear(self, variant: Variant) -> dict[str, Any]:
        assert self._load.stdout is not None
        result: dict[str, Any] = json.loads(self._load.stdout.readline() or '{"error": "the load generator ended"}')
        if "error" in result:
            raise SystemExit(f"{variant.name}: {result['error']}")
        return result

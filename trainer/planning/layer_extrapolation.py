"""Estimates a step of all layers from two traces of few layers: each further layer adds the same amount.

This holds for the memory of each part of the step, not for its peak, which may move to another part. The bottom and top
blocks are parts of their own. Between them memory rises or falls steadily, so its peak is at an end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from agentrl.trainer.planning.collective_trace import Route, Traffic
from agentrl.trainer.planning.memory_trace import Peak
from agentrl.trainer.planning.shape_folder import Layers
from agentrl.trainer.planning.step_trace import Effort, StepTrace

MIDDLE = "middle"


def edges(layers: Layers) -> tuple[int, int]:
    """How many bottom and top blocks need parts of their own: a block's peak depends on the kinds of its neighbours."""
    return layers.beginning + layers.period + 1, layers.period + 1


def samples(layers: Layers) -> tuple[Layers, Layers]:
    """The two models to trace; twice the whole model where it is small."""
    bottom, top = edges(layers)
    fewest = ceil((bottom + top - layers.beginning) / layers.period)
    if layers.times <= fewest + 1:
        return layers, layers
    return layers.fewer(fewest), layers.fewer(fewest + 1)


def extrapolated(first: StepTrace, second: StepTrace, at: tuple[Layers, Layers], layers: Layers) -> StepTrace:
    """The trace of all `layers`, from the traces of the two models `at`."""
    if at[0] == at[1]:
        return first
    times = (layers.times - at[0].times) / (at[1].times - at[0].times)

    def line(a: float, b: float) -> float:
        return a + (b - a) * times

    def peak(a: Peak, b: Peak) -> Peak:
        return Peak({k: max(0, round(line(a.held.get(k, 0), b.held.get(k, 0)))) for k in _keys(a.held, b.held)})

    def traffic(a: Mapping[Route, Traffic], b: Mapping[Route, Traffic]) -> dict[Route, Traffic]:
        none = Traffic()
        return {route: (a.get(route, none)) * (1 - times) + b.get(route, none) * times for route in _keys(a, b)}

    def effort(a: Effort, b: Effort) -> Effort:
        return Effort(line(a.flops, b.flops), line(a.seconds, b.seconds), traffic(a.traffic, b.traffic))

    return replace(
        second,
        peaks={n: peak(first.peaks[n], p) for n, p in second.peaks.items() if n in first.peaks and MIDDLE not in n},
        resting=peak(first.resting, second.resting),
        parameters=line(first.parameters, second.parameters),
        trained=line(first.trained, second.trained),
        efforts={n: effort(first.efforts[n], e) for n, e in second.efforts.items() if n in first.efforts},
    )


def _keys(*mappings: Mapping[Any, Any]) -> Iterable[Any]:
    return {key: None for mapping in mappings for key in mapping}

"""The peak of memory that the planner predicts for a step of one GPU, in a process of its own.

Fake and real process groups cannot share a process: `python -m gpus.planned_peak FOLDER SETTINGS TOKENS` prints bytes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agentrl.configs.resources_config import TrainerSizes
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.metrics.devices import labelled
from agentrl.trainer.planning.step_trace import Machine, trace_step
from agentrl.trainer.planning.workload import Workload


def planned_peak(folder: Path, config: TrainerConfig, tokens: int) -> float:
    """Bytes that tensors hold at the peak of a step with one trajectory of so many tokens, half of them a prompt."""
    command = [sys.executable, "-m", "gpus.planned_peak", str(folder), config.model_dump_json(), str(tokens)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Trace the step. The kind of GPU changes times only."""
    folder, settings, tokens = sys.argv[1:]
    config = TrainerConfig.model_validate_json(settings)
    work = Workload(tokens=int(tokens), prompt=int(tokens) // 2, group_size=1, groups=1)
    trace = trace_step(Path(folder), config, TrainerSizes(), Machine(labelled("H100-80"), 1), work, passes=1)
    print(trace.worst[1].total)


if __name__ == "__main__":
    main()

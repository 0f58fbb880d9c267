"""Steps of a run's trainer, timed by part: `python one_step.py URL CONFIG MODEL STEPS`; a line of JSON for each step.

Runs with the package of this commit, and with that of earlier commits. A step is `prepare_batch` and `update`; it is
not saved, so that each one has the same batch. The first step warms up.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from training.clock import Clock

from agentrl.configs.run_config import RunConfig
from agentrl.store import Database
from agentrl.trainer.distributed import join_world
from agentrl.trainer.stop import Stop
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.training_run import opened


def main(url: str, config: RunConfig, model: Path, steps: int) -> None:
    """Measure each step."""
    with join_world("cpu", threads=torch.get_num_threads()) as world:
        database = Database(url)
        lineage = StoredLineage.begin(database, config)
        with opened(config, model, world, lineage, None, Stop()) as run:
            clock = Clock(world.device)
            clock.watch(run._t.policy)
            with clock.watching(run._t.optimizer):
                for _ in range(steps):
                    clock.seconds.clear()
                    start = time.perf_counter()
                    batch = run.prepare_batch()
                    prepared = time.perf_counter()
                    assert batch is not None
                    metrics = run.update(batch)
                    end = time.perf_counter()
                    run._updated = None
                    parts = dict(clock.seconds) | {"prepare": prepared - start, "seconds": end - start}
                    times = {name: value for name, value in metrics.items() if name.startswith("time/")}
                    print(json.dumps(parts | times | {"loss": metrics["loss"]}), flush=True)
        database.close()


if __name__ == "__main__":
    main(sys.argv[1], RunConfig.model_validate_json(Path(sys.argv[2]).read_text()), Path(sys.argv[3]), int(sys.argv[4]))

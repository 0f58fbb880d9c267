"""Run by ranks.py: averages a sharded model's weights over steps and writes a checkpoint. rank_average.py OUT MODEL

Before the last step the average goes to a checkpoint and comes from there. facts.json has the elements of the average
that rank 0 holds, and those of the whole.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from checkpointed_policy import RECORD
from rank_versions import move

from agentrl.trainer.averages.weight_average import WeightAverage
from agentrl.trainer.checkpoints import checkpoint_reader, checkpoint_writer
from agentrl.trainer.distributed import join_world
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.rank_parts import owned
from agentrl.trainer.models.sharding import load_sharded


def main(out: Path, model: Path) -> None:
    """Average four moves of the weights."""
    with join_world("cpu") as world:
        policy: Policy = load_sharded(Policy, model, world.mesh)
        average = WeightAverage(policy, 0.9)
        for step in range(1, 5):
            move(policy, step, 1)
            average.add(policy)
            record = replace(RECORD, step=step)
            writing = checkpoint_writer.begin(out / "checkpoints", record, average.parts(), world, copied=False)
            made = writing.finish()
            world.barrier()
            if step == 3:
                average = WeightAverage(policy, 0.9)
                for part, tensors in average.parts().items():
                    checkpoint_reader.fill(made.folder, part, tensors, world)
        if world.leads:
            held = sum(owned(tensor)[0].numel() for tensor in average.tensors.values())
            whole = sum(tensor.numel() for tensor in average.tensors.values())
            (out / "facts.json").write_text(json.dumps({"held": held, "whole": whole}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Run by ranks.py: what ranks do while rank 0 works, and when one dies. rank_control.py FOLDER

beats       rank 0 works for longer than gloo's time-out, and no rank times out
averages    a gradient that tensor ranks hold alike, and that drifted on one of them
dies        rank 2 ends while the others wait: rank 0 gets it at its next word, rank 1 from rank 0's end
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support import random_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer import distributed
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models.run_models import make_models
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.parallel.tensor_parallel import _is_replicated, average_replicated
from agentrl.trainer.update import update_policy

GLOO_S = 3.0


def beats(world: World) -> None:
    for group in (None, world.files):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GLOO_S), group)
    distributed.HEARTBEAT_S = 0.3
    start = time.monotonic()

    def work() -> str:
        time.sleep(1.5 * GLOO_S)
        return "made"

    assert world.from_leader(work) == "made"
    made = world.only_leader(lambda: world.rank)
    assert made == (0 if world.leads else None)
    assert time.monotonic() - start > GLOO_S
    assert world.total({"ranks": 1.0}) == {"ranks": 2.0}  # nothing of the beats is left over


def averages(world: World, folder: Path) -> None:
    config = TrainerConfig(tokens_per_microbatch=60, grad_clip=1e9)
    policy = make_models(folder, config, world).policy
    optimizer = make_optimizer(policy, config)
    held = {}

    def watch(*_: object) -> None:
        for name, p in policy.trainable():
            assert isinstance(p.grad, torch.distributed.tensor.DTensor)
            if _is_replicated(p.grad, world.mesh):
                held[name] = p.grad.to_local().clone()
        if world.rank % 2:
            next(p for name, p in policy.trainable() if "input_layernorm" in name).grad.to_local().add_(1.0)
        drifted = {name: p.grad.to_local().clone() for name, p in policy.trainable() if name in held}
        average_replicated(policy, world.mesh)
        for name, p in policy.trainable():
            if name in held:
                others = world.everyones(drifted[name])
                mine = [others[r] for r in range(world.size) if r // 2 == world.data_rank]
                torch.testing.assert_close(p.grad.to_local(), torch.stack(mine).mean(0))

    optimizer.register_step_pre_hook(watch)
    update_policy(policy, optimizer, random_samples(), 1, {0: 1, 1: 0}, config, world)
    kinds = {name.split(".")[-2] for name in held}
    assert kinds == {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}, kinds
    for name, grad in held.items():
        found = world.everyones(grad)
        assert all(torch.equal(found[r], found[r - r % 2]) for r in range(world.size)), name


def dies(world: World, folder: Path) -> None:
    if world.rank == world.size - 1:
        (folder / "killed").touch()
        os._exit(0)  # without a word, as SIGKILL ends it
    while world.leads and not (folder / "killed").exists():
        time.sleep(0.05)
    start = time.monotonic()
    try:
        while True:
            world.share("a batch is awaited")
            time.sleep(0.2 if world.leads else 0)
    except RuntimeError as error:
        took_s = time.monotonic() - start
        (folder / f"noticed-{world.rank}").write_text(f"{took_s:.1f} s: {error}")
        os._exit(0)  # as a rank that fails: the others lose their connections to it


if __name__ == "__main__":
    case, where = sys.argv[1], Path(sys.argv[2])
    with join_world("cpu", threads=1, tensor_parallel=2 if case == "averages" else 1) as here:
        if case == "beats":
            beats(here)
        elif case == "averages":
            averages(here, where)
        else:
            dies(here, where)

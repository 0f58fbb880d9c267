"""Run by ranks.py: rank 0 offers a version's tensors to engines, and the other ranks help. rank_offers.py OUT FOLDER

Rank 0 writes what engines would get: shared.safetensors from the payloads, broadcast.safetensors from the buckets. It
also stops a broadcast after one bucket, and has no room for a share on rank 1. Each rank writes handed-RANK.json: how
its process of checkpoint-engine ended, by what failed.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from version_setup import writer

from agentrl.domain.schemas import Json
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.publish import offers as offers_module
from agentrl.trainer.publish import tensor_broadcast, tensor_sharing
from agentrl.trainer.publish.engine_handles import Group, NoHandles
from agentrl.trainer.publish.offers import Offers
from agentrl.trainer.publish.tensor_sharing import NoRoom
from agentrl.trainer.weights.model_export import trainable

MEMBERS: list[Json] = [{"url": "http://e", "ranks": 1}]


def led(world: World, offers: Offers, work: Callable[[], None]) -> None:
    """As `ask` does: rank 0 works, the others help until it is done."""
    if world.leads:
        work()
        world.share(None)
    else:
        while (word := world.share(None)) is not None:
            offers.help(word)


def shared(offers: Offers, out: Path) -> None:
    with offers.shared(MEMBERS, 5.0) as transfer:
        payloads = [payload for bucket in transfer["payloads"]["http://e"] for payload in bucket]
        found = {name: tensor.clone() for p in payloads for name, tensor in pickle.loads(base64.b64decode(p))}
    save_file(found, out / "shared.safetensors")


def broadcast(offers: Offers, taken: dict[str, torch.Tensor], most: int) -> None:
    """Take at most so many buckets, in place of a sender."""

    @contextmanager
    def sent(buckets: Iterator[dict[str, torch.Tensor]], outputs: Any, *_: Any, **settings: Any) -> Iterator[Json]:
        for bucket, described in zip(buckets, outputs[:most], strict=False):
            shapes = {name: tuple(tensor.shape) for name, tensor in bucket.items()}
            assert shapes == {output.name: output.shape for output in described}
            taken.update(bucket)
        yield {}

    real, tensor_broadcast.broadcast = tensor_broadcast.broadcast, sent  # type: ignore
    try:
        with offers.broadcast(MEMBERS, torch.device("cpu"), 5.0):
            pass
    finally:
        tensor_broadcast.broadcast = real


def without_room(offers: Offers) -> None:
    with pytest.raises(NoRoom, match="full on rank 1"), offers.shared(MEMBERS, 5.0):
        raise AssertionError("there is no room on rank 1")


def handed(offers: Offers, folder: Path, engines_fail: bool) -> None:
    """Let checkpoint-engine send the files of a version to engines that read them, or fail."""
    with offers.handed(folder, MEMBERS, Group("127.0.0.1", 1, 2, 1024, 5.0)) as transfer:
        assert transfer["handles"] == {"GPU-0": "ipc"}
        if engines_fail:
            raise ConnectionError


def each_handed(world: World, offers: Offers, folder: Path) -> Json:
    """Hand a version four times; how this rank's process ended, and the files that it had, by what failed."""
    ended: Json = {}
    for failing in ("nothing", "the engines", "rank 0", "rank 1"):

        @contextmanager
        def process(group: Group, rank: int, name: str, files: Sequence[Path], failing=failing) -> Iterator[Json]:
            ended[failing] = ["did not start", []]
            if failing == f"rank {rank}":
                raise NoHandles(failing)
            ended[failing] = ["was killed", [name, *(file.name for file in files)]]
            yield {f"GPU-{rank}": "ipc"}
            ended[failing][0] = "ended"

        def work(failing: str = failing) -> None:
            try:
                handed(offers, folder, failing == "the engines")
            except (ConnectionError, NoHandles) as error:
                ended[failing].append(type(error).__name__)

        offers_module.handles = process  # type: ignore[assignment]
        led(world, offers, work)
    return ended


def main(out: Path, folder: Path) -> None:
    with join_world("cpu", threads=1) as world:
        policy = load_sharded(Policy, folder, world.mesh)
        made = writer(policy, folder, world, dtype=torch.bfloat16, bucket_bytes=16384)
        offers = Offers(world, partial(made.stream, dict(policy.trainable())))
        led(world, offers, lambda: shared(offers, out))
        taken: dict[str, torch.Tensor] = {}
        led(world, offers, lambda: broadcast(offers, taken, 1))
        assert bool(taken) == world.leads
        led(world, offers, lambda: broadcast(offers, taken, 1000))
        if world.rank == 1:
            tensor_sharing._copied = no_room  # type: ignore[assignment]
        led(world, offers, lambda: without_room(offers))
        version = out / "v3-c"
        if world.leads:
            version.mkdir()
            for number in range(3):
                (version / f"{number}.safetensors").touch()
        ended = each_handed(world, offers, version)
        (out / f"handed-{world.rank}.json").write_text(json.dumps(ended))
        whole = trainable(policy, world)
        if world.leads:
            save_file(taken, out / "broadcast.safetensors")
            save_file({n: t.to(torch.bfloat16) if t.ndim > 1 else t for n, t in whole.items()}, out / "own.safetensors")


def no_room(*_: Any) -> None:
    raise RuntimeError("full on rank 1")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

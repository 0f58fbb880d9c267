"""Run by ranks.py: ranks that train a run, each with its own part of the batches. rank_batches.py FOLDER MODEL URL WHAT

all     trains all steps; each rank writes the trajectories that it has read
dies    rank 1 ends while it reads the second step's tokens; the others notice
fails   rank 1 gets an error when it reads tokens; each rank writes how it ends
ours    trains all steps with the functions of batch_functions.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from batch_functions import trained
from proxy_stub import ADMIN_KEY

from agentrl.configs.run_config import RunConfig
from agentrl.errors import StoreError
from agentrl.store import Database
from agentrl.store.training.paths import path_tokens
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.loop import train
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.stop import Stop
from agentrl.trainer.stored_lineage import StoredLineage, reading_lineage
from agentrl.trainer.training_run import opened


def watch(world: World, what: str) -> list[str]:
    """The trajectories that this rank reads from now on."""
    read: list[str] = []
    real = path_tokens.read

    def watched(conn: Any, paths: Any, **kwargs: Any) -> Any:
        if what == "dies" and world.rank == 1 and read:
            os._exit(0)
        if what == "fails" and world.rank == 1:
            raise StoreError("the disk is full")
        read.extend(paths)
        return real(conn, paths, **kwargs)

    path_tokens.read = watched
    return read


def main(folder: Path, config: RunConfig, url: str, what: str) -> None:
    stop = Stop()
    with join_world("cpu", threads=1) as world:
        read = watch(world, what)
        database = Database(f"sqlite:///{folder}/store.db")
        lineage = StoredLineage.begin(database, config) if world.leads else reading_lineage(database, config)
        publisher = Publisher(url, ADMIN_KEY, stop.wait) if world.leads else None
        try:
            if what == "ours":
                with opened(config, Path(config.model), world, lineage, publisher, stop) as run:
                    losses = trained(run)
                (folder / f"losses-{world.rank}.json").write_text(json.dumps(losses))
            else:
                train(config, Path(config.model), world, lineage, publisher, stop)
        except StoreError as error:
            (folder / f"failed-{world.rank}").write_text(str(error))
            return
        except RuntimeError as error:
            (folder / f"noticed-{world.rank}").write_text(str(error))
            os._exit(0)
        finally:
            database.close()
        (folder / f"read-{world.rank}.json").write_text(json.dumps(read))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    main(path, RunConfig.model_validate_json((path / "config.json").read_text()), *sys.argv[2:])

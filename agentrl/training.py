"""`agentrl.training`: makes a Python file the trainer of a run.

python script.py ─► training() ─► supervises engines, proxy, workers and trainer, then exits
                                                                      │
                                                  the same file, in each of the trainer's ranks
                                                                      └► training() ─► the run
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentRLError, UserError
from agentrl.processes.restarts import USER_ERROR_STATUS
from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.configs.run_config import RunConfig
    from agentrl.trainer.training_run import TrainingRun


@contextmanager
def training(
    config: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), *, from_base: bool = False
) -> Iterator[TrainingRun]:
    """The run whose trainer is the calling script. Started by hand, the script starts or resumes the whole run.

    `config` is the run's configuration, its fields, or its YAML file, with `overrides` as for `agentrl train`. A
    process that is not the trainer supervises the run and then exits here (SystemExit), with status 0 when the run has
    all of its steps: it never enters the block. In the trainer, `config` is ignored in favour of the run's own.

    Errors of the run are printed as one line, with exit status 2.
    """
    if "agentrl.trainer.user_script" in sys.modules:
        from agentrl.trainer.user_script import PLACE

        if (place := PLACE.get()) is not None:
            with place.open() as run:
                yield run
            return
    sys.exit(_supervise(config, overrides, from_base=from_base))


def _supervise(config: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str], *, from_base: bool) -> int:
    """Run all processes of the run to its end; returns the exit status, which is that of `agentrl train`."""
    from agentrl.cli.train import INTERRUPTED_STATUS, supervise
    from agentrl.launch.run_lifecycle import Stopped

    try:
        supervise(_with_script(_loaded(config, overrides)), from_base=from_base)
    except Stopped as stopped:
        say(str(stopped))
        return INTERRUPTED_STATUS
    except AgentRLError as error:
        say(f"agentrl: {error}", err=True)
        return USER_ERROR_STATUS
    return 0


def _loaded(config: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> RunConfig:
    from agentrl.configs.config_files import apply_override, load_config, parse_config
    from agentrl.configs.run_config import RunConfig

    if isinstance(config, str | Path):
        return load_config(Path(config), list(overrides))
    data = config.model_dump(mode="json") if isinstance(config, RunConfig) else dict(config)
    for item in overrides:
        apply_override(data, item)
    return parse_config(data)


def _with_script(config: RunConfig) -> RunConfig:
    """The configuration whose trainer runs this process's script, with its arguments."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None or not Path(main).is_file():
        raise UserError("agentrl.training: call it from a Python file, which the trainer's processes run too")
    file, here = Path(main).resolve(), Path.cwd().resolve()
    script = [os.fspath(file.relative_to(here) if file.is_relative_to(here) else file), *sys.argv[1:]]
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"script": script})})

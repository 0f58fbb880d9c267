"""`agentrl engine`: starts one inference server, watches it and restarts it; `check` examines one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.cli.engine_check import check
from agentrl.errors import UserError
from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.console import Console
    from agentrl.engine.membership import Place
    from agentrl.engine.server_process import Server
    from agentrl.engine.supervisor import EngineSupervisor


commands = typer.Typer()
commands.command()(check)


@commands.callback(invoke_without_command=True)
def engine(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option("--model", help="smollm2, tiny, or a Hugging Face folder.", show_default=False)
    ] = None,
    backend: Annotated[
        Literal["sglang", "vllm"], typer.Option(help="The inference server. vllm needs `make setup-vllm`.")
    ] = "sglang",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto uses CUDA when it is available.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU."),
    ] = "auto",
    max_total_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Key/value cache size, in tokens; default: 16384 on a CPU, what fits on a GPU."),
    ] = None,
    max_running_requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests decoded together; default: 64 on a CPU, the server's choice on a GPU."),
    ] = None,
    start_timeout_s: Annotated[float, typer.Option(min=1, help="Timeout of a start.")] = 300.0,
    log_file: Annotated[
        Path | None, typer.Option(help="File for the server's output; default: runs/engine-PORT.log.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Load this folder's weights after each start.")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="The version of --weights.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Sampling seed; default: random.")] = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Use each call's own sampling seed, for runs with engine.deterministic."),
    ] = False,
    routed_experts: Annotated[
        bool,
        typer.Option(
            "--routed-experts", help="Report a mixture's experts, for runs with trainer.routing_replay: engine."
        ),
    ] = False,
    pause_in_place: Annotated[
        bool,
        typer.Option("--pause-in-place", help="Compute nothing during a pause, for runs with publish.pause: in_place."),
    ] = False,
    lora_rank: Annotated[int, typer.Option(min=0, help="Largest rank of adapters that can be loaded; 0: none.")] = 0,
    lora_target: Annotated[
        list[str] | None, typer.Option(help="Name of a linear layer that adapters may change; default: all.")
    ] = None,
    join: Annotated[
        str | None, typer.Option(help="URL of a proxy: join its run while it goes on. Needs AGENTRL_ADMIN_KEY.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="URL at which proxies reach this engine; default: http://HOST:PORT.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A run's YAML file: take the model and all settings of an engine from it.", show_default=False
        ),
    ] = None,
    index: Annotated[int, typer.Option(min=0, help="Number of the engine in the run of --config, from 0.")] = 0,
    host_rank: Annotated[
        int, typer.Option(min=0, help="Number of this host, from 0, with resources.engines.hosts above 1.")
    ] = 0,
    leader: Annotated[
        str | None, typer.Option(help="HOST:PORT of host 0, where the hosts of the engine meet.", show_default=False)
    ] = None,
) -> None:
    """Start an SGLang or vLLM server on a GPU or CPU, restart it when it dies, and end it on Ctrl-C.

    Base weights are version 0. A proxy that uses the server loads the run's version into it. The server requires the
    key in AGENTRL_ENGINE_KEY; without one it creates a random key in a file beside the log, which the proxy needs, or,
    with --join, derives a key from AGENTRL_ADMIN_KEY as the proxies do.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    import os

    from rich.text import Text

    from agentrl.configs.config_files import load_config
    from agentrl.configs.engine_config import default_dtype
    from agentrl.configs.trainer_config import ALL_LINEAR
    from agentrl.console import Console
    from agentrl.engine.engine_spec import EngineSpec
    from agentrl.engine.membership import Place
    from agentrl.engine.server_process import check_port, free_port, pick_device
    from agentrl.engine.supervisor import EngineSupervisor, Weights
    from agentrl.environment import ENGINE_KEY, key_from
    from agentrl.launch.engine_specs import engine_spec
    from agentrl.models import check_model_folder, resolve_model

    if advertise is not None and join is None:
        raise UserError("--advertise needs --join")
    if (model is None) == (config is None):
        raise UserError("give --model, or --config with a run's settings")
    if (weights is None) != (version is None):
        raise UserError("--weights and --version go together")
    run = None if config is None else load_config(config)
    if run is not None and run.resources.takes_turns:
        raise UserError(
            "resources.colocated: `agentrl engine` does not know when the trainer has the GPUs' memory: let "
            "`agentrl train` start the engines, or set resources.divide_memory: true"
        )
    if weights is not None:
        check_model_folder(weights)
    port = port or free_port(host)
    check_port(host, port)
    console = Console()
    name = model if run is None else run.model
    with console.status(Text(f"preparing model {name}")):
        folder = resolve_model(str(name))
        device = pick_device(device)
    log_file = log_file or Path("runs") / f"engine-{port}.log"
    key_file = log_file.with_suffix(".key")
    key = key_from(os.environ, ENGINE_KEY) or create_key_file(key_file)
    if run is not None:
        hosts = run.resources.engines.hosts
        place = {"hosts": hosts, "host_rank": host_rank, "leader": leader} if hosts > 1 else {}
        spec = engine_spec(run, folder, index, host=host, port=port, log_file=log_file, key=key, **place)
        start_timeout_s = run.engine.start_timeout_s
    else:
        spec = EngineSpec(
            backend=backend,
            model=folder,
            host=host,
            port=port,
            device=device,
            dtype=default_dtype(device) if dtype == "auto" else dtype,
            max_total_tokens=max_total_tokens,
            max_running_requests=max_running_requests,
            log_file=log_file,
            seed=seed,
            deterministic=deterministic,
            routed_experts=routed_experts,
            paused_in_place=pause_in_place,
            lora_rank=lora_rank,
            lora_targets=tuple(lora_target or [ALL_LINEAR]),
            key=key,
        )
    loaded = Weights(path=weights, version=version) if weights is not None and version is not None else None
    observer = _Screen(console, spec.log_file, None if key_from(os.environ, ENGINE_KEY) else key_file)
    joins = None if join is None or spec.host_rank else Place(join, _admin_key(), advertise or spec.url)
    alone = spec.hosts == 1
    supervisor = EngineSupervisor(spec, observer, weights=loaded, start_timeout_s=start_timeout_s, restarts=alone)
    _run_until_signal(supervisor, observer, joins)


def _refuse_options(context: typer.Context) -> None:
    """Raise UserError for an option of the engine to start before the name of a command."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise UserError(f"--{option}: not an option of `agentrl engine {context.invoked_subcommand}`")


def create_key_file(path: Path) -> str:
    """Write a random key to a file with mode 0600."""
    from agentrl.engine.engine_keys import new_key
    from agentrl.files import touch_private

    key = new_key()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    touch_private(path)
    path.write_text(key)
    return key


def _admin_key() -> str:
    """The admin key of the proxy to join. Raises UserError without one."""
    import os

    from agentrl.environment import ADMIN_KEY, key_from

    key = key_from(os.environ, ADMIN_KEY)
    if key is None:
        raise UserError(f"--join needs the proxy's admin key in {ADMIN_KEY}")
    return key


def _run_until_signal(supervisor: EngineSupervisor, screen: _Screen, place: Place | None) -> None:
    """Run until SIGINT or SIGTERM, then leave the run and end the server, with status 0."""
    import asyncio
    import signal

    from agentrl.engine.membership import member
    from agentrl.errors import root_cause

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(supervisor.run())
            async with member(supervisor.spec, place):
                await asyncio.wait([serving, group.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()

    try:
        asyncio.run(main())
    except BaseExceptionGroup as problem:
        raise root_cause(problem) from None
    finally:
        screen.close()
    say("engine stopped")


class _Screen:
    """Displays the supervisor's events, and a spinner with the last log line while the server starts."""

    def __init__(self, console: Console, log_file: Path, key_file: Path | None) -> None:
        self._console = console
        self._key_file = key_file
        self._log_file = log_file
        self._status = console.status("starting the engine")
        self._status.start()

    def starting(self, elapsed_s: float, log_line: str) -> None:
        from rich.text import Text

        self._status.update(Text.assemble(f"starting the engine: {elapsed_s:.0f} s  ", (log_line[:80], "dim")))

    def serving(self, server: Server, start_s: float) -> None:
        self._status.stop()
        self._console.print(f"engine serving on {server.url} after {start_s:.0f} s (log: {self._log_file})")
        if self._key_file is not None:
            self._console.print(f"its key, for the proxy: export AGENTRL_ENGINE_KEY=$(cat {self._key_file})")

    def died(self, reason: str, restart_in_s: float) -> None:
        self._console.print(f"{reason}\nrestarting in {restart_in_s:.0f} s")
        self._status.start()

    def close(self) -> None:
        self._status.stop()

"""`agentrl scorer`: serves a trained reward model over HTTP."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from agentrl.errors import UserError
from agentrl.visible import say


def scorer(
    model: Annotated[str, typer.Argument(help="Folder that `agentrl reward-model` wrote, such as runs/NAME/model.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8090,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need AGENTRL_SCORER_KEY.")] = (
        "127.0.0.1"
    ),
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto uses CUDA when it is available.")
    ] = "auto",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the computation.")] = "float32",
) -> None:
    """Serve a reward model, for the verifier `reward_model` (docs/rewards.md). Runs until it is stopped."""
    import uvicorn

    from agentrl.engine.server_process import check_port, free_port
    from agentrl.environment import SCORER_KEY, is_loopback, key_from
    from agentrl.models import resolve_model
    from agentrl.trainer.tuning.reward_scoring import RewardScorer
    from agentrl.trainer.tuning.reward_server import RewardServer

    key = key_from(os.environ, SCORER_KEY)
    if key is None and not is_loopback(host):
        raise UserError(f"--host {host}: set {SCORER_KEY}, since other machines can reach this address")
    port = port or free_port()
    check_port(host, port)
    folder = resolve_model(model)
    server = RewardServer(RewardScorer(folder, device, dtype), str(folder), key)
    say(f"reward model {folder} at http://{host}:{port}")
    uvicorn.run(server.app(), host=host, port=port, log_level="warning")

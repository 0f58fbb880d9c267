"""vLLM with authentication, exact spans and verified weights: `python -m agentrl.engine.vllm.keyed_vllm ARGUMENTS`,
with `vllm serve`'s arguments and `--weight-version N`, the label of the base weights.

The key comes from AGENTRL_ENGINE_KEY; an engine on loopback may have none. vLLM's own `--api-key` guards some of its
routes only, and not those that pause it or change its weights. It runs in vLLM's environment, with agentrl in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.engine.engine_client import Capability
from agentrl.engine.folder_guard import ChecksFolders
from agentrl.engine.key_required import KeyRequired, without_cors
from agentrl.engine.stored_weights import STORED_WEIGHTS, FetchesWeights, StoredWeights, stored_weights
from agentrl.engine.vllm import early_spans
from agentrl.engine.vllm.vllm_routes import ServerRoutes
from agentrl.environment import ENGINE_KEY, drop_secrets

OLDEST, FIRST_UNTRIED = (0, 32), (0, 33)
"""Versions of vLLM whose inner parts are known: from the first, before the second."""
WORKER = "agentrl.engine.vllm.vllm_worker.CheckpointWorker"
WEIGHT_VERSION = "--weight-version"
LOGPROBS = "processed_logprobs"
_OTHERWISE = ("--uds", "--grpc", "--grpc-port", "--headless", "--api-server-count", "--data-parallel-size")
"""Options with which other processes, or none of these routes, would serve."""
ALWAYS = (
    Capability.WEIGHTS,
    Capability.EARLY_SPANS,
    Capability.FULL_LOGPROBS,
    Capability.GRAMMARS,
    Capability.PAUSES,
    Capability.DIGESTS,
)


def guard(
    app: Any,
    key: str | None,
    promises: dict[str, Any],
    weights: StoredWeights | None = None,
    checks: LoadChecks | None = None,
) -> None:
    """Add our routes and the middleware to vLLM's app before it starts, and remove its CORS middleware.

    Without a key everybody may send requests, except web pages. With `weights`, versions that are not on this host are
    copied from object storage. With `checks`, folders that do not fit the model are refused.
    """
    from starlette.middleware import Middleware

    ServerRoutes(promises).add_to(app)
    others = without_cors(app)
    keyed = [] if key is None else [Middleware(KeyRequired, key=key)]
    fetching = [] if weights is None else [Middleware(FetchesWeights, weights=weights)]
    checking = [] if checks is None else [Middleware(ChecksFolders, checks=checks)]
    app.user_middleware = [*keyed, *fetching, *checking, *others]
    app.middleware_stack = app.build_middleware_stack()  # vLLM has built one, of the middleware before


def main(argv: list[str]) -> None:
    """Serve until stopped."""
    key = os.environ.get(ENGINE_KEY)
    stored = os.environ.get(STORED_WEIGHTS)
    drop_secrets()  # vLLM's child processes need no key
    label, rest = labelled(argv)
    check(rest)
    import vllm
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

    check_version(vllm.__version__)
    early_spans.send_with_every_event(RequestState)
    know_pauses(AsyncLLM)
    build, init = entry.build_app, entry.init_app_state

    def build_app(args: Any, *others: Any) -> Any:
        app = build(args, *others)
        promises = {"capabilities": capabilities(args), "vllm": vllm.__version__}
        checks = LoadChecks(Path(args.model))
        guard(app, key or None, promises, stored_weights(stored) if stored else None, checks)
        return app

    async def init_app_state(engine: Any, *others: Any) -> None:
        await init(engine, *others)
        if engine.model_config.logprobs_mode != LOGPROBS:
            sys.exit(f"agentrl: an engine reports logprobs of what it samples from: --logprobs-mode {LOGPROBS}")
        await engine.update_weight_version(label)

    entry.build_app, entry.init_app_state = build_app, init_app_state
    sys.argv = ["vllm", *rest, "--worker-extension-cls", WORKER]
    entry.main()


def labelled(argv: list[str]) -> tuple[str, list[str]]:
    """The label of the base weights, and the arguments without it."""
    if WEIGHT_VERSION not in argv:
        return "0", argv
    at = argv.index(WEIGHT_VERSION)
    return argv[at + 1], argv[:at] + argv[at + 2 :]


def check(argv: list[str]) -> None:
    """Exit for options with which vLLM would bypass the middleware."""
    given = {argument.partition("=")[0] for argument in argv}
    if otherwise := [option for option in _OTHERWISE if option in given]:
        sys.exit(f"agentrl: an engine serves HTTP/1.1 from one process: leave out {', '.join(otherwise)}")


def check_version(version: str) -> None:
    """Exit for a version of vLLM whose inner parts are unknown."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= found < FIRST_UNTRIED:
        wanted = f"{'.'.join(map(str, OLDEST))} or newer, before {'.'.join(map(str, FIRST_UNTRIED))}"
        sys.exit(f"agentrl: vLLM {version} is installed, and agentrl starts {wanted}")


def capabilities(args: Any) -> list[str]:
    """The abilities of a server with these arguments."""
    found = [*ALWAYS, *([Capability.ADAPTERS] if args.enable_lora else [])]
    return [capability.value for capability in found]


def know_pauses(engine: Any) -> None:
    """Let `engine`, vLLM's class, know in its own process whether it is paused."""
    pause, resume = engine.pause_generation, engine.resume_generation

    async def pause_generation(self: Any, **how: Any) -> None:
        self.agentrl_paused = True
        await pause(self, **how)

    async def resume_generation(self: Any) -> None:
        await resume(self)
        self.agentrl_paused = False

    engine.agentrl_paused = False
    engine.pause_generation, engine.resume_generation = pause_generation, resume_generation


if __name__ == "__main__":
    main(sys.argv[1:])

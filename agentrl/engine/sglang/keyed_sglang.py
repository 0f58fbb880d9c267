"""SGLang with authentication and prepared versions: `python -m agentrl.engine.sglang.keyed_sglang ARGUMENTS`, with
`sglang.launch_server`'s arguments.

The key comes from AGENTRL_ENGINE_KEY; an engine on loopback may have none. SGLang's own `--api-key` would appear on the
command line and in `/server_info`, and its CORS settings admit any web page. This module adds middleware to SGLang's
app and removes CORS. With a key it rejects options that would serve another app, without the middleware.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.engine.control.preparation import VERSIONS
from agentrl.engine.folder_guard import ChecksFolders
from agentrl.engine.key_required import KeyRequired, without_cors
from agentrl.engine.prepared.prepares_versions import PreparesVersions
from agentrl.engine.prepared.version_host import VERSION_CACHE, VersionHost, version_cache
from agentrl.engine.stored_weights import STORED_WEIGHTS, FetchesWeights, StoredWeights, stored_weights
from agentrl.environment import ENGINE_KEY, drop_secrets

_OTHERWISE = ("grpc_mode", "smg_grpc_mode", "grpc_port", "encoder_only", "use_ray", "enable_http2")


def guard(
    app: Any,
    key: str | None,
    host: VersionHost,
    weights: StoredWeights | None = None,
    checks: LoadChecks | None = None,
) -> None:
    """Add the middleware to a Starlette app before it starts, and remove its CORS middleware.

    Without a key everybody may send requests, except web pages. With `weights`, versions that are not on this host are
    copied from object storage. With `checks`, folders that do not fit the model are refused.
    """
    from starlette.middleware import Middleware

    others = without_cors(app)
    keyed = [] if key is None else [Middleware(KeyRequired, key=key, with_tokens=VERSIONS)]
    fetching = [] if weights is None else [Middleware(FetchesWeights, weights=weights)]
    checking = [] if checks is None else [Middleware(ChecksFolders, checks=checks)]
    app.user_middleware = [*keyed, Middleware(PreparesVersions, host=host), *fetching, *checking, *others]


def main(argv: list[str]) -> None:
    """Serve until stopped."""
    key = os.environ.get(ENGINE_KEY)
    stored = os.environ.get(STORED_WEIGHTS)
    cache = version_cache(os.environ.get(VERSION_CACHE))
    drop_secrets()  # SGLang's child processes need no key
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(argv)
    if key:
        check(server_args)
    from sglang.srt.entrypoints import http_server

    checks = LoadChecks(Path(server_args.model_path))
    host = VersionHost(cache, key or None, checks)
    guard(http_server.app, key or None, host, stored_weights(stored) if stored else None, checks)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def check(server_args: Any) -> None:
    """Exit for options with which SGLang would bypass the middleware."""
    otherwise = [name for name in _OTHERWISE if getattr(server_args, name, None)]
    if (getattr(server_args, "tokenizer_worker_num", 1) or 1) > 1:
        otherwise.append("tokenizer_worker_num")
    if otherwise:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in otherwise)
        sys.exit(f"agentrl: an engine with a key serves HTTP/1.1 from one process: leave out {options}")


if __name__ == "__main__":
    main(sys.argv[1:])

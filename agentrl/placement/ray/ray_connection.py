"""Connects this process to the Ray cluster of `RAY_ADDRESS`, which Ray sets in a job, else to that of this host."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from agentrl.errors import ConfigError

NAMESPACE = "agentrl"
RAY_ADDRESS = "RAY_ADDRESS"
CONNECT_S = 10.0


def connected() -> Any:
    """The module `ray`, connected. Raises ConfigError, in one line, when Ray or the cluster is not there."""
    try:
        import ray
        from ray._private.services import get_ray_address_from_environment
        from ray.exceptions import RayError
    except ImportError as error:
        raise ConfigError("placement=ray needs Ray: pip install 'agentrl[ray]'") from error
    if ray.is_initialized():
        return ray
    try:
        address = _reachable(get_ray_address_from_environment("auto", None))
        with _signals_kept():
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConfigError:
        raise
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"placement=ray: {' '.join(str(error).split())}") from error
    return ray


def _reachable(address: str) -> str:
    """`address`, if it accepts connections. Ray ends the whole process after two minutes when it does not."""
    if "://" in address:
        raise ConfigError(f"{RAY_ADDRESS}={address}: start the run on a host of the cluster, or with `ray job submit`")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"placement=ray: no cluster at {address} ({error})") from error
    return address


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this program's handler of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)

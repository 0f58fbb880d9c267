"""One SGLang server as a child process: command line, environment, start-up, log file, end.

    launch(spec) ──► ServerProcess ──► wait_healthy(on_wait) ──► … ──► stop()

The server leads its own process group, which `stop` ends as a whole. It also ends when its parent dies, however that
happens: the kernel sends the leader SIGTERM, and a small watchdog process ends the rest of the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from agentrl.errors import EngineUnavailable, UserError

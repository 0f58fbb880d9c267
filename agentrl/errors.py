"""The exceptions that agentrl raises.

AgentRLError
├── UserError (ValueError)        invalid input; the message is one line and names the field
│   ├── ConfigError               a config file, an override or a flag
│   └── ModelFolderError          a model folder is missing or incomplete, or its model is not supported
├── RequestError                  an HTTP error response with a status and a code
├── StoreError                    the database rejected an operation, is damaged, or has an old schema
│   ├── StoreUnavailable          it stayed unreachable or locked for the whole wait: retry later
│   ├── ValueRefused              it cannot hold a value that the caller sent
│   └── FencedError               a newer trainer epoch has started
├── StorageError                  the object storage refused an operation, or did not answer in time
│   ├── DamagedObject             what it holds is incomplete, or has another checksum
│   └── CacheError                this host's cache cannot be written, or has no room
├── UnknownAttention              prefix-tree attention does not support the model
├── MisplacedTensor               an operation mixes tensors of the CPU and of the fake accelerator
├── NonFiniteError                a loss or a gradient is NaN or infinite
└── EngineError                   an inference engine failed a call
    ├── EngineKeyRefused          the engine requires another key, or one at all
    ├── EngineUnavailable         the engine does not answer, or the pool is empty
    │   └── EngineDied            the connection broke during a call
    └── EngineRejected            the engine rejected the request with a 4xx
        ├── CannotPrepare         the engine has no routes for prepared versions
        └── NotPrepared           the engine has not swapped a version in, and still has its old weights
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AgentRLError(Exception):
    """Base class of all errors raised by agentrl."""


class UserError(AgentRLError, ValueError):
    """Invalid input. The message is one line, names the field, and is shown without a traceback."""


class ConfigError(UserError):
    """A config file, an override or a flag is invalid."""


class ModelFolderError(UserError):
    """A model folder is missing or incomplete, or the trainer does not support its model."""


class RequestError(AgentRLError):
    """An HTTP error response: `status`, a machine-readable `code`, the invalid `param`, and `retry_after_s`."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


def bad_parameter(param: str, message: str, status: int = 400) -> RequestError:
    """The error of an invalid value. Model routes answer 400, as OpenAI and Anthropic do, other routes 422."""
    return RequestError(status, message, code="invalid_parameter", param=param)


def no_session(session_id: str) -> RequestError:
    """The 404 for an unknown session."""
    return RequestError(404, f"no session {session_id!r}", code="session_not_found")


class StoreError(AgentRLError):
    """The database rejected an operation, is damaged, or has an old schema."""


class StoreUnavailable(StoreError):
    """The database stayed unreachable or locked for the whole wait. Retry later."""


class ValueRefused(StoreError):
    """The database cannot hold a value, for example text with NUL in PostgreSQL."""


class FencedError(StoreError):
    """A newer trainer has started: this trainer's epoch is over."""


class StorageError(AgentRLError):
    """The object storage refused an operation, or did not answer in time."""


class DamagedObject(StorageError):
    """An object or a folder in the storage is incomplete, or has another checksum."""


class CacheError(StorageError):
    """This host's cache cannot be read or written, or has no room. Another source of the files would not help."""


class UnknownAttention(AgentRLError):
    """Prefix-tree attention does not support the model's attention. The trainer then uses unpacked sequences."""


class MisplacedTensor(AgentRLError):
    """An operation of the trainer mixes tensors of the CPU and of the fake accelerator. A GPU would refuse it."""


class NonFiniteError(AgentRLError):
    """A loss or a gradient is NaN or infinite. The message names the trajectories that caused it."""


class EngineError(AgentRLError):
    """An inference engine failed a call.

    The message is for the operator and may contain the engine's address and response body. `engine_message` is the part
    that is safe to send to the client: the engine's own error about the request.
    """

    def __init__(self, message: str, *, engine_message: str = "") -> None:
        super().__init__(message)
        self.engine_message = engine_message


class EngineKeyRefused(EngineError):
    """The engine requires another key than it was sent, or one at all."""


class EngineUnavailable(EngineError):
    """The engine does not answer, or the pool is empty."""


class EngineDied(EngineUnavailable):
    """The connection broke after the request was sent. The request may have crashed the engine."""


class EngineRejected(EngineError):
    """The engine rejected the request with a 4xx: `status`, which is None for an error within a stream."""

    def __init__(self, message: str, *, engine_message: str = "", status: int | None = None) -> None:
        super().__init__(message, engine_message=engine_message)
        self.status = status


class CannotPrepare(EngineRejected):
    """The engine has no routes for prepared versions: it loads versions under a pause."""


class NotPrepared(EngineRejected):
    """The engine has not swapped a version in, because it is not ready or not paused. It still has its old weights."""


def root_cause(error: BaseException) -> BaseException:
    """The first error inside nested exception groups; `error` itself when it is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest choice, else the list of choices; nothing if there are none."""
    options = sorted(str(choice) for choice in choices)  # str: the value of an enum member
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; choose from {', '.join(options)}" if options else ""

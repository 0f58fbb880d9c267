"""Every error that agentrl raises on purpose.

AgentRLError
├── UserError (ValueError)        bad input; the message is one line and names the field
│   ├── ConfigError               a config file, an override, a flag
│   └── ModelFolderError          a model folder that is missing, incomplete or of a model that cannot be trained
├── RequestError                  an HTTP answer with a status and a code, in the caller's dialect
├── StoreError                    the database refused, is damaged, or is too old
│   ├── StoreUnavailable          it cannot be reached or is locked, for longer than was waited: try later
│   ├── ValueRefused              a value that it cannot hold: the caller's fault
│   └── FencedError               an older trainer epoch met a newer one
├── UnknownAttention              a model's attention is not the one that prefix trees have
├── NonFiniteError                training met a loss or a gradient that is NaN or infinite
└── EngineError                   an inference engine failed a call
    ├── EngineUnavailable         nobody answers, or no engine is in the pool
    │   └── EngineDied            the connection broke off under a call
    └── EngineRejected            the engine refused the request (its own 4xx)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AgentRLError(Exception):
    """Base of all errors raised on purpose."""


class UserError(AgentRLError, ValueError):
    """Bad input. The message is one line, names the field, and is shown without a traceback."""


class ConfigError(UserError):
    """A config file, an override or a flag is wrong."""


class ModelFolderError(UserError):
    """A model folder is missing or incomplete, or the trainer cannot train its model."""


class RequestError(AgentRLError):
    """An HTTP answer: `status`, a machine-readable `code`, the `param` at fault, seconds to `retry_after_s`."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class StoreError(AgentRLError):
    """The database refused, is damaged, or has an older schema."""


class StoreUnavailable(StoreError):
    """The database cannot be reached, or is locked, and waiting did not help: try later."""


class ValueRefused(StoreError):
    """A value that the database cannot hold, for example text with NUL in PostgreSQL."""


class FencedError(StoreError):
    """This trainer's epoch is over: a newer trainer has started."""


class UnknownAttention(AgentRLError):
    """A model attends in a way that the attention over prefix trees does not: it is trained unpacked."""


class NonFiniteError(AgentRLError):
    """A loss or a gradient is NaN or infinite; the message names the trajectories that are to blame."""


class EngineError(AgentRLError):
    """An inference engine failed a call.

    The message is for the operator: it may hold the engine's address and whatever answered there. `said` is what the
    engine itself says of the request, for whoever sent it.
    """

    def __init__(self, message: str, *, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class EngineUnavailable(EngineError):
    """Nobody answers at the engine's address, or no engine is in the pool."""


class EngineDied(EngineUnavailable):
    """The connection broke off after the engine had the request: it may have died of it."""


class EngineRejected(EngineError):
    """The engine refused the request with a 4xx of its own."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest choice, else the list of choices."""
    options = sorted(str(choice) for choice in choices)  # an enum shows its value
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; choose from {', '.join(options)}"

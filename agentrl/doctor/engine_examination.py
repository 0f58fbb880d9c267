"""Examines one engine: what it is, what it can do, and what it lacks for training.

reachable? ─► which backend? ─► facts, capabilities ─► 4 tokens ─► problems and notes

Nothing in the engine changes: it is asked and sampled from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import aiohttp

from agentrl.doctor.engine_probe import TOKENS, Probe, probe
from agentrl.domain.schemas import Json
from agentrl.engine.backends import BACKENDS
from agentrl.engine.checks.supported_releases import Support
from agentrl.engine.chunks import version_of_label
from agentrl.engine.engine_client import Capability, EngineClient, EngineInfo, Health, ServerFacts
from agentrl.environment import ENGINE_KEY, is_loopback
from agentrl.errors import EngineError, EngineKeyRefused, EngineRejected, EngineUnavailable

LACKS: Mapping[Capability, str] = {
    Capability.WEIGHTS: "only adapters can be published to it (trainer.lora.publish: adapter)",
    Capability.EARLY_SPANS: "if it dies after weights changed during an answer, the answer is sampled again or fails",
    Capability.FULL_LOGPROBS: "calls with top_p, top_k or min_p are refused",
    Capability.GRAMMARS: "response formats and forced tool calls are refused",
    Capability.PAUSES: "weights cannot be changed while it has calls",
    Capability.DIGESTS: "publish.verify compares nothing",
    Capability.PREPARATION: "it is paused while it loads a version",
    Capability.TENSORS: "publish.transport distributed and tensor use the folder instead",
    Capability.HANDLES: "publish.transport checkpoint_engine uses the folder instead",
    Capability.ADAPTERS: "trainer.lora.publish: adapter is not possible",
    Capability.MEMORY: "resources.colocated is not possible",
    Capability.EXPERTS: "trainer.routing_replay: engine is not possible",
}
"""What a run does without a capability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """A capability that an engine does not have."""

    capability: Capability
    effect: str
    option: str | None  # how to start the server to have it; None: this backend cannot


@dataclass(kw_only=True, slots=True)
class EngineReport:
    """What was found out about an engine; None and empty: not found out. `problems` prevent training."""

    url: str
    backend: str | None = None
    title: str | None = None
    release: str | None = None
    supported: str | None = None
    health: Health | None = None
    requires_key: bool | None = None
    model: str | None = None
    label: str | None = None
    context_tokens: int | None = None
    capabilities: list[Capability] = field(default_factory=list)
    lacks: list[Lack] = field(default_factory=list)
    probe: Probe | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def version(self) -> int | None:
        """The label as a number."""
        return None if self.label is None else version_of_label(self.label)

    @property
    def ready(self) -> bool:
        """Whether a run can be trained with the engine."""
        return not self.problems

    def as_json(self) -> Json:
        """All of it, and the verdict."""
        return {**asdict(self), "ready": self.ready}


async def examine(url: str, key: str | None, backend: str | None, timeout_s: float) -> EngineReport:
    """Examine the engine at a URL, whose backend is found out unless it is given."""
    report = EngineReport(url=url)
    async with aiohttp.ClientSession() as http:
        try:
            report.backend, facts = await _recognized(url, http, key, [*BACKENDS] if backend is None else [backend])
            support = BACKENDS[report.backend].support
            with closing(BACKENDS[report.backend].client(url, http, key=key)) as client:
                await _examine(client, facts, support, report)
                report.requires_key = await _requires_key(url, http, report.backend)
                _judge_key(report)
                await _sample(client, support, report, timeout_s)
        except EngineKeyRefused:
            report.requires_key = True
            why = f"it requires its key: set {ENGINE_KEY}" if key is None else f"it refuses the key in {ENGINE_KEY}"
            report.problems.append(why)
        except EngineUnavailable as error:
            report.health = Health.DEAD
            report.problems.append(f"it does not answer: {error}")
        except EngineError as error:
            hint = "" if report.backend is None else f"; start it {BACKENDS[report.backend].support.start}"
            report.problems.append(f"{error}{hint}")
    return report


async def _recognized(
    url: str, http: aiohttp.ClientSession, key: str | None, names: Sequence[str]
) -> tuple[str, ServerFacts]:
    """The backend whose server answers, and the server's facts. Raises EngineError."""
    for name in names:
        with closing(BACKENDS[name].client(url, http, key=key)) as client:
            try:
                return name, await client.server_facts()
            except EngineRejected:
                continue
    raise EngineError(f"it does not answer as {' or '.join(BACKENDS[name].support.title for name in names)}")


async def _examine(client: EngineClient, facts: ServerFacts, support: Support, report: EngineReport) -> None:
    """Ask what the engine is and can do. Raises EngineError."""
    report.title, report.release, report.supported = support.title, facts.release, support.releases
    report.context_tokens = facts.context_tokens
    report.health = await client.health()
    info = await client.model_info()
    report.model, report.label = info.model_path, info.version
    can = await client.capabilities()
    report.capabilities = [capability for capability in Capability if capability in can]
    report.lacks = [
        Lack(capability=one, effect=effect, option=support.options.get(one))
        for one, effect in LACKS.items()
        if one not in can
    ]
    report.problems += _problems_of_server(facts, info, can, support)
    if support.is_untested(facts.release):
        report.notes.append(f"{support.title} {facts.release} is newer than the newest tested one, {support.tested}")


def _problems_of_server(
    facts: ServerFacts, info: EngineInfo, can: frozenset[Capability], support: Support
) -> Iterator[str]:
    if support.is_too_old(facts.release):
        yield f"{support.title} {facts.release} is too old: {support.oldest} or later is needed"
    if version_of_label(info.version) is None:
        yield f"its weights have the label {info.version!r}, which is no version: {support.label}"
    lacking = [one for one in (Capability.WEIGHTS, Capability.PAUSES) if one not in can]
    if lacking and Capability.ADAPTERS not in can:
        yield f"its weights cannot be changed: start it {support.options.get(lacking[0], support.start)}"


async def _sample(client: EngineClient, support: Support, report: EngineReport, timeout_s: float) -> None:
    """Sample from the engine if it serves. Raises EngineKeyRefused."""
    if report.health is Health.PAUSED:
        report.problems.append("it is paused, or still starting: it was not sampled from")
    if report.health is not Health.SERVING:
        return
    try:
        report.probe = await probe(client, report.version, timeout_s)
    except EngineKeyRefused:
        raise
    except EngineError as error:
        if report.version is None and isinstance(error, EngineUnavailable):
            return  # of the label, which is reported
        report.problems.append(f"it does not sample {TOKENS} tokens: {error}; start it {support.start}")
        return
    report.problems += report.probe.problems
    if report.probe.follows_temperature is False:
        wrong = "its logprobs are not of the distribution at the call's temperature"
        report.problems.append(f"{wrong}: start it {support.temperature}")


async def _requires_key(url: str, http: aiohttp.ClientSession, backend: str) -> bool:
    """Whether the engine refuses control requests without a key. Raises EngineError."""
    with closing(BACKENDS[backend].client(url, http)) as stranger:
        try:
            await stranger.model_info()
        except EngineKeyRefused:
            return True
    return False


def _judge_key(report: EngineReport) -> None:
    everybody = "it requires no key: everybody who reaches it can change its weights"
    if not report.requires_key and is_loopback(urlsplit(report.url).hostname or ""):
        report.notes.append(everybody)
    elif not report.requires_key:
        report.problems.append(f"{everybody}; set {ENGINE_KEY} when you start it")

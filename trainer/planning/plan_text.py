"""A plan as a table that is read in 20 seconds, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl.trainer.planning.collective_trace import Route, Traffic
from agentrl.trainer.planning.memory_trace import Holds
from agentrl.trainer.planning.run_plan import RunPlan, Tried

GIB, GB = 2**30, 1e9
LABELS = {
    Holds.PARAMETERS: "parameters",
    Holds.MOMENTS: "AdamW's moments",
    Holds.GRADIENTS: "gradients",
    Holds.GATHERED: "gathered weights",
    Holds.ACTIVATIONS: "activations",
    Holds.LOGITS: "logits",
    Holds.OTHER: "backward pass",
}


def plan_text(plan: RunPlan, disk: float) -> list[str]:
    """The lines of a plan. `disk`: bytes per second that a checkpoint is written with."""
    cluster, work, asked = plan.cluster, plan.work, plan.asked
    lines = [
        f"{plan.model}: {_count(plan.parameters)} parameters in {plan.layers} layers, {_count(plan.trained)} trained; "
        f"{cluster.hosts} × {cluster.gpus} {cluster.device.label}",
        f"step: {work.groups} groups of {work.group_size} trajectories of {work.tokens:,} tokens, "
        f"{work.prompt:,} of them a shared prompt",
        "",
    ]
    shown = [("as configured", asked)] + ([("proposed", plan.proposed)] if plan.proposed else [])
    lines += _table(shown)
    lines += ["", *_verdict(plan), "", *_engines(plan, disk)]
    if not plan.packed:
        lines.append("the trainer computes this model's sequences one by one: shared prompts are computed again")
    if plan.proposed:
        lines += ["", "to paste into the config:", "", *snippet(plan)]
    return lines


def _table(shown: list[tuple[str, Tried]]) -> Iterator[str]:
    rows: list[list[str]] = [["trainer, one GPU", *[name for name, _ in shown]]]

    def row(label: str, value: Any) -> None:
        rows.append([label, *[value(t.estimate, t) if t.estimate else "-" for _, t in shown]])

    row("ranks × tensor, replicas", lambda e, t: f"{t.setting.ranks} × {t.setting.tensor}, {t.setting.replicas}")
    for held, label in LABELS.items():
        row(f"  {label}", lambda e, t, held=held: f"{e.peak.held.get(held, 0) / GIB:.1f} GiB")
    row("peak, with driver and gaps", lambda e, t: f"{e.needed / GIB:.1f} of {e.available / GIB:.1f} GiB")
    row("  in", lambda e, t: e.part)
    row("microbatches of a step", lambda e, t: f"{e.microbatches} × {t.setting.budget:,}")
    row("step at best", lambda e, t: _seconds(e.seconds))
    row("  waiting for collectives", lambda e, t: _seconds(e.waiting))
    row("arithmetic of the peak (MFU)", lambda e, t: f"{e.mfu:.0%}")
    row("moved between GPUs", lambda e, t: _traffic(e.traffic))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    for r in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip()


def _traffic(traffic: dict[Route, Traffic]) -> str:
    total = sum(t.size for t in traffic.values())
    return f"{total / GB:,.0f} GB in {sum(t.messages for t in traffic.values()):,.0f}"


def _verdict(plan: RunPlan) -> Iterator[str]:
    asked, proposed = plan.asked, plan.proposed
    if asked.refused:
        yield f"as configured: refused: {asked.refused}"
    elif asked.fits:
        yield "as configured: fits"
    else:
        assert asked.estimate
        over = asked.estimate.needed - asked.estimate.available
        yield f"as configured: does not fit, {over / GIB:.1f} GiB too much"
    if proposed:
        changes = proposed.setting.changes(asked.setting)
        how = ", ".join(f"{key}: {_yaml(new)} (was {_yaml(old)})" for key, (old, new) in changes.items())
        yield f"{'faster' if asked.fits else 'fits'} with {how}"
    elif not asked.fits:
        tries = [t for t in plan.tried if t.estimate and t.estimate.fits is False]
        yield f"none of {len(plan.tried)} settings fits: more GPUs, or GPUs with more memory, are needed"
        if tries:
            near = min(tries, key=lambda t: t.estimate.needed if t.estimate else 0)
            assert near.estimate
            yield f"nearest: {near.setting} needs {near.estimate.needed / GIB:.1f} GiB"


def _engines(plan: RunPlan, disk: float) -> Iterator[str]:
    engines, memory = plan.engines, plan.engines.memory
    episodes = engines.episodes(plan.work.tokens)
    where = "on the trainer's GPUs, in turns" if engines.colocated else "on GPUs of their own"
    if memory.tokens:
        yield (
            f"engines: {engines.count} of {engines.tensor} GPUs {where}; each caches {memory.tokens:,} tokens "
            f"({memory.token / 1024:.3g} KiB each on a GPU): {episodes:,} episodes at once"
        )
    else:
        yield f"engines: the weights, {memory.weights / GIB:.1f} GiB on each GPU, do not fit beside what else is there"
    hosts = max(1, min(plan.cluster.hosts, (plan.proposed or plan.asked).setting.ranks // plan.cluster.gpus))
    yield (
        f"checkpoint: {plan.checkpoint_bytes / GB:,.1f} GB, {_seconds(plan.checkpoint_bytes / (disk * hosts))} at "
        f"{disk / GB:g} GB/s a host; published each step: {plan.publish_bytes / GB:,.1f} GB to each engine"
    )


def snippet(plan: RunPlan) -> list[str]:
    """The proposal as YAML."""
    chosen = (plan.proposed or plan.asked).setting
    engines = plan.engines
    trainer = f"ranks: {chosen.ranks}, replicas: {chosen.replicas}, tensor: {chosen.tensor}"
    for name, size in (("context", chosen.context), ("experts", chosen.experts)):
        trainer += f", {name}: {size}" if size > 1 else ""
    hosts = -(-chosen.ranks // plan.cluster.gpus)
    lines = ["resources:"]
    if engines.colocated and plan.cluster.hosts == 1:
        lines.append("  colocated: true")
    lines += [
        f"  engines: {{count: {engines.count}, tensor: {engines.tensor}}}",
        f"  trainer: {{{trainer}{f', hosts: {hosts}' if hosts > 1 else ''}}}",
        "engine:",
        "  dtype: bfloat16",
        "trainer:",
        f"  dtype: {chosen.dtype}",
        f"  tokens_per_microbatch: {chosen.budget}",
        f"  activation_checkpointing: {_yaml(chosen.checkpointing)}",
    ]
    return lines + (["  cpu_offload: true"] if chosen.offload else [])


def plan_json(plan: RunPlan, disk: float) -> dict[str, Any]:
    """The plan as plain data."""
    return {
        "model": plan.model,
        "parameters": plan.parameters,
        "trained": plan.trained,
        "layers": plan.layers,
        "packed": plan.packed,
        "gpus": {"label": plan.cluster.device.label, "of_a_host": plan.cluster.gpus, "hosts": plan.cluster.hosts},
        "asked": tried_json(plan.asked),
        "proposed": plan.proposed and tried_json(plan.proposed),
        "tried": [tried_json(t) for t in plan.tried],
        "engines": {
            "count": plan.engines.count,
            "tensor": plan.engines.tensor,
            "colocated": plan.engines.colocated,
            "weights_bytes": plan.engines.memory.weights,
            "token_bytes": plan.engines.memory.token,
            "cached_tokens": plan.engines.memory.tokens,
            "episodes": plan.engines.episodes(plan.work.tokens),
        },
        "publish_bytes": plan.publish_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_s": plan.checkpoint_bytes / disk,
        "yaml": "\n".join(snippet(plan)) if plan.proposed else None,
    }


def tried_json(tried: Tried) -> dict[str, Any]:
    """One setting as plain data."""
    setting, e = tried.setting, tried.estimate
    found: dict[str, Any] = {
        "ranks": setting.ranks,
        "replicas": setting.replicas,
        "context": setting.context,
        "experts": setting.experts,
        "tensor": setting.tensor,
        "tokens_per_microbatch": setting.budget,
        "dtype": setting.dtype,
        "activation_checkpointing": setting.checkpointing,
        "cpu_offload": setting.offload,
    }
    if e is None:
        return found | {"refused": tried.refused}
    return found | {
        "fits": e.fits,
        "needed_bytes": round(e.needed),
        "available_bytes": round(e.available),
        "host_bytes": round(e.host_bytes),
        "peak_bytes": {str(what): size for what, size in e.peak.held.items()},
        "peak_in": e.part,
        "microbatches": e.microbatches,
        "step_s": e.seconds,
        "waiting_s": e.waiting,
        "mfu": e.mfu,
        "collectives": [
            {"kind": r.kind, "ranks": r.ranks, "hosts": r.hosts, "of": r.of, "messages": t.messages, "bytes": t.size}
            for r, t in sorted(e.traffic.items())
        ],
    }


def _count(parameters: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return f"{parameters:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds / 60:,.1f} min" if seconds >= 120 else f"{seconds:.3g} s"


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

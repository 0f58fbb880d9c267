"""Traces of the cases whose memory is measured, and of a model with all and with few layers. Runs in one process."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from memory_cases import CASES

from agentrl.configs.resources_config import TrainerSizes
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.metrics.devices import labelled
from agentrl.trainer.planning.layer_extrapolation import edges, extrapolated, samples
from agentrl.trainer.planning.shape_folder import layers_of, with_layers, write_shape
from agentrl.trainer.planning.step_trace import Machine, StepTrace, trace_step
from agentrl.trainer.planning.workload import Workload

MACHINE = Machine(labelled("H100-80"))
MIXTURE = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 4096,
}
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


def trace_cases(names: list[str], root: Path, answers: Connection) -> None:
    """Send the predicted peak of each case."""
    for name in names:
        case = CASES[name]
        sizes = TrainerSizes(ranks=case.ranks)
        trace = trace_step(case.folder(root), case.config, sizes, MACHINE, case.work, passes=case.passes)
        answers.send((name, trace.worst[1].total))
    answers.close()


def trace_layers(root: Path, answers: Connection) -> None:
    """Send, for each model, the trace of all layers and the one extrapolated from few."""
    shared = (("dense", DENSE, 2, 1), ("mixture", MIXTURE, 4, 1), ("mixture, experts", MIXTURE, 4, 2))
    for name, shape, ranks, experts in shared:
        layers = layers_of(shape)
        at = samples(layers)
        assert at[1].count < layers.count, f"{name}: nothing is left out"
        config = TrainerConfig(dtype="bfloat16", activation_checkpointing=name != "dense", tokens_per_microbatch=256)

        def traced(
            chosen: object,
            shape: dict = shape,
            sizes: TrainerSizes = TrainerSizes(ranks=ranks, experts=experts),
            layers: object = layers,
            config: object = config,
        ) -> StepTrace:
            folder = write_shape(
                root / f"{shape['model_type']}-{sizes.experts}-{chosen.count}", with_layers(shape, chosen)
            )
            work = Workload(tokens=96, prompt=32, group_size=4, groups=2)
            return trace_step(folder, config, sizes, MACHINE, work, edges(layers))

        answers.send((name, (summary(traced(layers)), summary(extrapolated(traced(at[0]), traced(at[1]), at, layers)))))
    answers.close()


def summary(trace: StepTrace) -> dict:
    """What a plan uses of a trace."""
    efforts = {
        phase: {"flops": e.flops, "seconds": e.seconds}
        | {f"{r.kind} of {r.of}": (t.messages, t.size) for r, t in e.traffic.items()}
        for phase, e in trace.efforts.items()
    }
    return {
        "peak": trace.worst[1].total,
        "held": {str(k): v for k, v in sorted(trace.worst[1].held.items())},
        "resting": trace.resting.total,
        "parameters": trace.parameters,
        "efforts": efforts,
    }

"""What only a GPU can show: `make gpu` runs these tests. Elsewhere they are skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import AGES, random_samples, save_tiny_model

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer import update
from agentrl.trainer.distributed import World
from agentrl.trainer.kernels import fused_norms
from agentrl.trainer.models import run_models
from agentrl.trainer.models.head import logits_of
from agentrl.trainer.models.onednn import add_weight_gradient
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.parallel.mesh import make_mesh
from agentrl.trainer.scoring import make_samples

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu() -> Any:
    """A world of one rank on the first GPU, in a process group that knows both backends."""
    from agentrl.trainer.distributed import join_world

    if torch.distributed.is_initialized():
        pytest.skip("no GPU beside a world on the CPU: run these tests with -m gpu")
    with join_world("cuda") as world:
        yield world


def rewarded() -> list[Any]:
    found = enumerate(random_samples())
    return [replace(s.tokens, turn_returns=np.full(2, i % 3.0), episode_return=i % 3.0) for i, s in found]


def small_model(folder: Path) -> Path:
    """With heads of 16, the smallest size that FlexAttention takes."""
    return save_tiny_model(folder, hidden_size=64)


def step(folder: Path, world: World, **settings: Any) -> dict[str, float]:
    torch.manual_seed(0)
    config = TrainerConfig(tokens_per_microbatch=40, grad_clip=1e9, **settings)
    models = run_models.make_models(folder, config, world)
    for body in (models.policy, *([models.critic.critic] if models.critic else [])):
        assert {t.device.type for t in (*body.parameters(), *body.buffers())} == {"cuda"}
        assert not body.unpacked
    optimizer = make_optimizer(models.policy, config)
    samples = make_samples(rewarded(), config.algorithm, models, config.token_budget, world)
    return update.update_policy(models.policy, optimizer, samples, 1, AGES, config, world, models.critic)


@pytest.mark.parametrize("settings", [{}, {"algorithm": {"preset": "ppo", "kl_coef": 0.1}}], ids=["grpo", "ppo"])
def test_a_step_equals_the_cpus(settings: dict[str, Any], on_gpu: World, tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    cpu = replace(on_gpu, device=torch.device("cpu"), mesh=make_mesh("cpu", 1))
    torch.backends.cuda.matmul.allow_tf32 = False
    models_on_cpu = TrainerConfig(tokens_per_microbatch=40, grad_clip=1e9, dtype="float32", **settings)
    expected = _step_on_cpu(folder, cpu, models_on_cpu)
    found = step(folder, on_gpu, dtype="float32", **settings)
    for name in ("loss", "grad_norm", "entropy", "tokens_trained"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    rounded = step(folder, on_gpu, dtype="bfloat16", **settings)
    assert rounded["entropy"] == pytest.approx(expected["entropy"], rel=0.02)


def _step_on_cpu(folder: Path, world: World, config: TrainerConfig) -> dict[str, float]:
    torch.manual_seed(0)
    models = run_models.make_models(folder, config, world)
    optimizer = make_optimizer(models.policy, config)
    samples = make_samples(rewarded(), config.algorithm, models, config.token_budget, world)
    return update.update_policy(models.policy, optimizer, samples, 1, AGES, config, world, models.critic)


def test_no_microbatch_waits_for_the_gpu(on_gpu: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = update._accumulate_gradients

    def watched(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return accumulate(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    step(small_model(tmp_path), on_gpu)  # compiles and allocates
    monkeypatch.setattr(update, "_accumulate_gradients", watched)
    assert step(tmp_path, on_gpu)["tokens_trained"] > 0


def test_products_of_bfloat16_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(64, 512).bfloat16(), torch.randn(1000, 512).bfloat16()
    exact = hidden.double() @ head.double().t()
    torch.testing.assert_close(logits_of(hidden.cuda(), head.cuda()).double().cpu(), exact, rtol=0, atol=1e-3)
    summed, grad = torch.zeros(1000, 512, device="cuda"), torch.randn(64, 1000).bfloat16()
    add_weight_gradient(summed, grad.cuda(), hidden.cuda())
    torch.testing.assert_close(summed.double().cpu(), grad.double().t() @ hidden.double(), rtol=0, atol=1e-3)


def test_a_fused_norm_is_the_models() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = Qwen3RMSNorm(256).cuda()
    x = torch.randn(9, 256, device="cuda")
    expected = norm(x)
    fused_norms.adopt(norm)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)

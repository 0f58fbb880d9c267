"""Ranks that wait for rank 0, ranks that die, and gradients that tensor ranks hold alike."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks
from safetensors.torch import load_file  # noqa: F401 - before the ranks fork


def test_ranks_wait_for_rank_0_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    run_ranks("rank_control.py", 2, "beats", tmp_path)


def test_tensor_ranks_average_what_they_hold_alike(tmp_path: Path) -> None:
    from parallel.test_tensor_parallel import save

    run_ranks("rank_control.py", 4, "averages", save("Qwen3", tmp_path / "model"))


def test_a_dead_rank_is_noticed_while_the_others_wait(tmp_path: Path) -> None:
    run_ranks("rank_control.py", 3, "dies", tmp_path)
    for rank in (0, 1):
        took_s, why = (tmp_path / f"noticed-{rank}").read_text().split(" s: ", 1)
        assert float(took_s) < 20
        assert "onnection" in why, why

"""The tensor dict: padding, dtypes, and the file that is written without being held."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl.domain.experts.routed_experts import RoutedExperts
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.export import tensors


def trajectory(length: int, *, prompt: int = 2, value: float = 1.0) -> TrajectoryTokens:
    sampled = np.arange(length) >= prompt
    return TrajectoryTokens(
        trajectory_id=f"{length:032x}",
        session_id="s",
        episode_id="e",
        group_id="g",
        input_ids=np.arange(1, length + 1, dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.25, 0).astype(np.float32),
        versions=np.where(sampled, 7, -1).astype(np.int32),
        turn_ids=np.where(sampled, 0, -1).astype(np.int32),
        temperatures=np.ones(length, np.float32),
        turn_returns=np.array([value], np.float64),
        episode_return=value,
    )


def test_a_batch_is_padded_on_the_right() -> None:
    arrays = tensors.pad_batch([trajectory(3), trajectory(5, value=-2.0)])
    assert arrays["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert arrays["attention_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert arrays["loss_mask"].tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert arrays["logprobs"].tolist() == [[0, 0, -0.25, 0, 0], [0, 0, -0.25, -0.25, -0.25]]
    assert arrays["versions"].tolist() == [[-1, -1, 7, -1, -1], [-1, -1, 7, 7, 7]]
    assert arrays["rewards"].tolist() == [1.0, -2.0]
    assert {name: array.dtype for name, array in arrays.items()} == {
        "input_ids": np.int32,
        "attention_mask": np.bool_,
        "loss_mask": np.int32,
        "logprobs": np.float32,
        "versions": np.int32,
        "rewards": np.float32,
    }


def test_experts_are_added_where_a_trajectory_has_them() -> None:
    ids = np.arange(5 * 2 * 3, dtype=np.uint16).reshape(5, 2, 3)
    routed = RoutedExperts(ids, np.array([1, 1, 2, 1, 0], np.uint8))
    arrays = tensors.pad_batch([trajectory(6), replace(trajectory(5), routed=routed)])
    assert arrays["routed_experts"].shape == (2, 6, 2, 3)
    assert arrays["routed_experts"].dtype == np.int16
    np.testing.assert_array_equal(arrays["routed_experts"][1, :5], ids)
    assert not arrays["routed_experts"][0].any()
    assert arrays["expert_origins"].tolist() == [[0] * 6, [1, 1, 2, 1, 0, 0]]


def test_no_trajectories_give_empty_arrays() -> None:
    assert {name: array.shape for name, array in tensors.pad_batch([]).items()} == {
        name: (0,) if name == "rewards" else (0, 0) for name in tensors.DTYPES
    }


@pytest.mark.parametrize("lengths", [[], [3], [3, 5, 4], [9] * 7])
def test_a_file_filled_in_pieces_holds_what_pad_batch_makes(tmp_path, lengths) -> None:
    batch = [trajectory(n) for n in lengths]
    file = tmp_path / "x.safetensors"
    arrays = tensors.create_file(file, len(batch), max(lengths, default=0), {"run": "r"})
    for i, one in enumerate(batch):
        tensors.fill(arrays, i, [one])
    del arrays
    loaded, expected = load_file(file), tensors.pad_batch(batch)
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)

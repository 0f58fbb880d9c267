"""The launcher of vLLM: arguments, versions, and spans in every event."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engine.vllm import early_spans
from agentrl.engine.vllm.keyed_vllm import capabilities, check, check_version, labelled


def test_the_label_of_the_base_weights_is_ours() -> None:
    assert labelled(["--model", "m", "--weight-version", "3", "--seed", "1"]) == ("3", ["--model", "m", "--seed", "1"])
    assert labelled(["--model", "m"]) == ("0", ["--model", "m"])


@pytest.mark.parametrize("option", ["--uds", "--grpc-port=1", "--data-parallel-size", "--headless"])
def test_options_that_bypass_the_key_are_refused(option: str) -> None:
    check(["--model", "m"])
    with pytest.raises(SystemExit, match="leave out"):
        check(["--model", "m", option])


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0"])
def test_another_version_of_vllm_is_refused(version: str) -> None:
    check_version("0.32.0")
    check_version("0.32.1+cpu")
    with pytest.raises(SystemExit, match=r"agentrl starts 0\.32 or newer, before 0\.33"):
        check_version(version)


def test_a_server_promises_adapters_where_it_has_room_for_them() -> None:
    found = capabilities(SimpleNamespace(enable_lora=False))
    assert "early spans" in found
    assert set(capabilities(SimpleNamespace(enable_lora=True))) - set(found) == {"adapters"}


def test_every_output_has_the_spans_of_all_tokens_so_far() -> None:
    class State:
        n = 0

        def _new_completion_output(self, new: int, finish_reason: str | None) -> Any:
            self.n += new
            return SimpleNamespace(weight_versions=None)

        def _weight_version_spans(self) -> list[tuple[str, int, int]]:
            return [("3", 0, self.n)]

    early_spans.send_with_every_event(State)
    state = State()
    assert [state._new_completion_output(2, None).weight_versions for _ in range(2)] == [[("3", 0, 2)], [("3", 0, 4)]]

"""What agentrl adds to vLLM's workers (`--worker-extension-cls`): weights that are loaded verifiably, their digests,
and logprobs of the whole distribution. Imports vLLM; a worker imports it before it loads the model.

vLLM's own reload is wrong on a CPU: it packs the weights for its kernels and keeps no others, so that new ones have no
effect where they share memory with packed ones. Here the weights are kept beside the packed ones, changed in place,
and packed again. On a GPU its own reload is used, and what it has loaded is compared with the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample.sampler import Sampler

from agentrl.engine.vllm import full_logprobs
from agentrl.engine.vllm.held_weights import HeldWeights, Recorder

TENSORS = "*.safetensors"
PLAIN = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""How vLLM names layers whose weights it uses as they are in the checkpoint, or packed."""
_pack = layers.dispatch_cpu_unquantized_gemm
_load_weights, _all_weights = DefaultModelLoader.load_weights, DefaultModelLoader.get_all_weights


class CheckpointWorker:
    """Methods that a worker gets, called by the server (`vllm_routes.py`). Each returns what JSON can carry."""

    device: Any
    get_model: Callable[[], Any]
    reload_weights: Callable[..., None]

    def agentrl_problem(self, folder: str) -> str | None:
        """Why the weights of a folder cannot take the place of those in use; None if they can."""
        try:
            with _opened(folder) as files:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
        except (OSError, SafetensorError, ValueError) as error:
            return f"{folder} cannot be read: {error}"
        if self._is_on_cpu() and (layer := _converted_layer(self.get_model())) is not None:
            return f"vLLM on a CPU converts the weights of {layer}: they cannot be changed"
        return self._held().problem(shapes)

    def agentrl_load(self, folder: str) -> str | None:
        """Load the weights of a folder in which `agentrl_problem` finds none. Returns why it failed, if it did: the
        weights in memory are then unknown.
        """
        try:
            with _opened(folder) as files:
                return self._loaded(folder, files)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            return f"{folder} was not loaded: {type(error).__name__}: {error}"

    def agentrl_digests(self) -> dict[str, str]:
        """Digests of the weights in memory."""
        return self._held().digests(self.get_model())

    def _loaded(self, folder: str, files: dict[str, Any]) -> str | None:
        held, model = self._held(), self.get_model()
        if self._is_on_cpu():
            for name, file in files.items():
                held.put(name, file.get_tensor(name))
            for module in model.modules():
                if hasattr(module, "cpu_linear"):
                    _pack(module, remove_weight=False)
        else:
            self.reload_weights(weights_path=folder)
        for name, file in files.items():
            if held.differing(name, file.get_tensor(name)):
                return f"{name} of {folder} is not in the model after the load"
        return None

    def _held(self) -> HeldWeights:
        model = self.get_model()
        if not isinstance(model.agentrl_weights, HeldWeights):
            model.agentrl_weights = HeldWeights.of(model.agentrl_weights, model)
        held: HeldWeights = model.agentrl_weights
        return held

    def _is_on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"


@contextmanager
def _opened(folder: str) -> Iterator[dict[str, Any]]:
    """The tensors of a folder: name → the open file that has it. Raises OSError, SafetensorError, ValueError."""
    paths = sorted(Path(folder).glob(TENSORS))
    if not paths:
        raise ValueError("there are no safetensors files")
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  (the file is no mapping)
                if name in found:
                    raise ValueError(f"two files have a tensor {name}")
                found[name] = file
        yield found


def _converted_layer(model: torch.nn.Module) -> str | None:
    """The first layer that computes with something else than its weights."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        plain = method is None or type(method).__name__ in PLAIN
        if "MLA" in type(module).__name__ or not plain:
            return name or type(module).__name__
    return None


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    _pack(layer, remove_weight=False)


def _recording_load(self: Any, model: torch.nn.Module, model_config: Any) -> None:
    with Recorder(model) as recorder:
        object.__setattr__(model, "agentrl_weights", recorder)
        _load_weights(self, model, model_config)


def _announced(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = _all_weights(self, model_config, model)
    found = model.agentrl_weights
    return found.beginning(tensors) if isinstance(found, Recorder) else tensors  # a reload is not recorded


layers.dispatch_cpu_unquantized_gemm = _keep_weights
DefaultModelLoader.load_weights = _recording_load
DefaultModelLoader.get_all_weights = _announced
full_logprobs.report(Sampler)
if HAS_TRITON:  # else there is no V2 model runner
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    full_logprobs.report_on_gpu(SamplerV2, SamplingStates)

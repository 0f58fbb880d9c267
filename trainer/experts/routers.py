"""The routers of a mixture-of-experts model of transformers, and how one is made to choose given experts.

A router computes a logit for each expert, chooses the `top_k` best by `torch.topk`, and weighs them by their
probabilities, in its family's own way. To replay a choice, the router's own code runs with another result of that one
call: the given experts, and the values that the call would have returned for them. So weights are exact in every family
whose router chooses by one `torch.topk` over all experts, and gradients flow to the router.

N: tokens, E: experts, k: experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.errors import ModelFolderError

SIZES = ("num_experts", "n_routed_experts", "num_local_experts")
"""The names that routers have for the number of experts."""


@dataclass(frozen=True, slots=True)
class Router:
    """A router, and the decoder layer that it is in."""

    module: nn.Module
    layer: int
    top_k: int
    experts: int
    logits_at: int | None = None  # the place of its logits among its outputs; None where that is not clear


@dataclass(slots=True)
class Choice:
    """The choices of a router in one pass."""

    router: int  # its number among the model's routers
    experts: int
    experts_Nk: Tensor  # int64
    logits_NE: Tensor | None  # None where they are not observed

    def first(self, tokens: int) -> Choice:
        """The choice for the first `tokens` of its tokens."""
        logits = None if self.logits_NE is None else self.logits_NE[:tokens]
        return Choice(self.router, self.experts, self.experts_Nk[:tokens], logits)


def find_routers(blocks: Iterable[nn.Module]) -> list[Router]:
    """The routers of a model's decoder blocks, at most one in each; none in a model without experts.

    Raises ModelFolderError for a router that does not choose by one top-k over all experts.
    """
    found = []
    for layer, block in enumerate(blocks):
        routers = [(name, module) for name, module in block.named_modules() if type(module).__name__.endswith("Router")]
        if len(routers) > 1:
            raise ModelFolderError(f"decoder block {layer} has {len(routers)} routers: one can be replayed")
        found += [_router(layer, name, module) for name, module in routers]
    return found


def _router(layer: int, name: str, module: nn.Module) -> Router:
    where = f"{type(module).__name__}, {name} of decoder block {layer},"
    top_k, weight = getattr(module, "top_k", None), getattr(module, "weight", None)
    if not isinstance(top_k, int) or not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ModelFolderError(f"{where} has no top_k or no matrix: its choice cannot be replayed")
    experts = next((size for size in (getattr(module, name, None) for name in SIZES) if size), len(weight))
    router = Router(module, layer, top_k, experts)
    hidden = torch.empty(2, weight.shape[1], device="meta")
    for others in ((), (torch.empty(experts, device="meta"),)):  # some families hand their router a bias
        outputs = _tried(router, hidden, *others)
        if outputs is not None:
            logits = [place for place, one in enumerate(outputs) if getattr(one, "shape", None) == (2, experts)]
            return replace(router, logits_at=logits[0] if len(logits) == 1 else None)
    raise ModelFolderError(f"{where} does not choose by one top-k of all experts: its choice cannot be replayed")


def _tried(router: Router, *inputs: Tensor) -> Sequence[Any] | None:
    """The outputs of a copy of the router without memory; None unless it chooses once."""
    module, mode = deepcopy(router.module).to("meta"), ChoosesTopK(router)
    try:
        with torch.no_grad(), mode:
            outputs = module(*inputs)
    except (TypeError, ValueError, RuntimeError):  # it takes other inputs
        return None
    return outputs if mode.calls == 1 and isinstance(outputs, tuple) else None


class ChoosesTopK(TorchFunctionMode):
    """While it is active, the router's top-k over all experts returns `given_Nk` where `has_N`, else its own result."""

    def __init__(self, router: Router, given_Nk: Tensor | None = None, has_N: Tensor | None = None) -> None:
        super().__init__()
        self._router, self._given_Nk, self._has_N = router, given_Nk, has_N
        self.calls = 0
        self.experts_Nk: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called in place of each torch function."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return result
        scores_NE: Tensor = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if k != self._router.top_k or scores_NE.ndim != 2 or scores_NE.shape[-1] != self._router.experts:
            return result  # for example of groups of experts
        self.calls += 1
        values_Nk, experts_Nk = result
        if self._given_Nk is not None and self._has_N is not None:
            experts_Nk = torch.where(self._has_N[:, None], self._given_Nk, experts_Nk)
            values_Nk = scores_NE.gather(-1, experts_Nk)
        self.experts_Nk = experts_Nk
        return torch.return_types.topk((values_Nk, experts_Nk))

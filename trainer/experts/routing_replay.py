"""Routing replay: a mixture's routers choose the experts that the engine chose when it sampled (R3, arXiv 2510.11370).

    Body.hidden(microbatch) ─► replaying(routes) ─► each router: the engine's experts where they are known,
                                                    its own elsewhere; weights and gradients from its own logits

The policy's passes before and in the update replay. The reference's do not: it has other weights, so its distribution
is defined by its own routers, and a choice that is forced on it would make it another model. A block that activation
checkpointing computes again replays the routes of its first pass, whatever is in force by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from agentrl.errors import ModelFolderError
from agentrl.trainer.experts.node_routes import NodeRoutes
from agentrl.trainer.experts.routers import Choice, ChoosesTopK, Router, find_routers


class Routing:
    """The routers of one model, which it wraps. With `replays`, they choose what `replaying` gives them."""

    def __init__(self, routers: Sequence[Router], *, replays: bool) -> None:
        self.routers = routers
        self._replays = replays
        self._routes: NodeRoutes | None = None
        self._observed: dict[int, list[Choice]] | None = None  # by router
        self._keeps_logits = False
        for number, router in enumerate(routers):
            forward = partial(self._route, number, router.module.forward)
            router.module.forward = forward

    @contextmanager
    def replaying(self, routes: NodeRoutes | None) -> Iterator[None]:
        """Let the routers choose `routes` for the tokens of the passes in the block."""
        before, self._routes = self._routes, routes if self._replays else None
        try:
            yield
        finally:
            self._routes = before

    @contextmanager
    def observing(self, *, logits: bool) -> Iterator[list[Choice]]:
        """Fill the list with the choices of each router, one for each pass, when the block ends; with their `logits`,
        which live as long as the list.
        """
        found: list[Choice] = []
        self._keeps_logits = logits
        self._observed = {number: [] for number in range(len(self.routers))}
        try:
            yield found
            found += [choice for choices in self._observed.values() for choice in choices]
        finally:
            self._observed = None

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of a checkpointed block's first pass and of its recomputation (`context_fn`)."""
        return nullcontext(), self._again(self._routes)

    @contextmanager
    def _again(self, routes: NodeRoutes | None) -> Iterator[None]:
        observed, self._observed = self._observed, None
        try:
            with self.replaying(routes):
                yield
        finally:
            self._observed = observed

    def _route(self, number: int, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The router's forward pass."""
        routes, router = self._routes, self.routers[number]
        if routes is None and self._observed is None:
            return forward(hidden, *args, **kwargs)
        given_Nk = has_N = None
        if routes is not None:
            tokens = hidden.numel() // hidden.shape[-1]
            assert tokens == len(routes.origins_N), f"{tokens} tokens and routes of {len(routes.origins_N)}"
            given_Nk, has_N = routes.experts_NLk[:, router.layer].long(), routes.origins_N > 0
        mode = ChoosesTopK(router, given_Nk, has_N)
        with mode:
            result = forward(hidden, *args, **kwargs)
        assert mode.experts_Nk is not None, "find_routers has checked that it chooses"
        if self._observed is not None:
            kept = self._keeps_logits and router.logits_at is not None
            logits_NE = result[router.logits_at] if kept else None
            self._observed[number].append(Choice(number, router.experts, mode.experts_Nk, logits_NE))
        return result


def routing_of(blocks: Iterable[nn.Module], *, replays: bool, balances: bool) -> Routing | None:
    """The routing of a model's decoder blocks, before they are sharded; None without experts.

    Raises ModelFolderError for a model without routers that can be replayed, where it `replays` or `balances`.
    """
    required = replays or balances
    try:
        routers = find_routers(blocks)
    except ModelFolderError:
        if required:
            raise
        return None
    if required and not routers:
        raise ModelFolderError("trainer.routing_replay and router_aux_loss_coef need a mixture-of-experts model")
    if balances and any(router.logits_at is None for router in routers):
        name = type(routers[0].module).__name__
        raise ModelFolderError(f"trainer.router_aux_loss_coef: {name} does not return the logits of all experts")
    return Routing(routers, replays=replays) if routers else None

"""Publishing weights, for the trainer: `/admin/publish`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field

from agentrl.domain.schemas import Json
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.access.request_bounds import MAX_INT32
from agentrl.proxy.engines import publishing
from agentrl.proxy.engines.tensor_transfer import Transfer, members
from agentrl.proxy.engines.version_delivery import Delivery
from agentrl.proxy.routes import app_parts
from agentrl.proxy.routes.authenticated_bodies import GuardedRoute
from agentrl.proxy.routes.request_bodies import Body

router = APIRouter(tags=["admin"], route_class=GuardedRoute)


class PublishBody(Body):
    """The version to publish; the store has its folder. A publish with an old trainer `epoch` is refused.

    `transfer`: how engines get the tensors without the folder. `digests`: the expected digests, by the engines' tensor
    names. `bytes`: size of the version.
    """

    version: int = Field(ge=0, le=MAX_INT32)
    epoch: int | None = Field(default=None, ge=0, le=MAX_INT32)
    transfer: Transfer | None = None
    digests: dict[str, str] = Field(default_factory=dict)
    bytes: int | None = Field(default=None, ge=0)


@router.post("/admin/publish")
async def publish_version(body: PublishBody, request: Request) -> Json:
    """Bring every engine to a version and move the run to it."""
    await app_parts.access(request).require(request, Power.ADMIN)
    delivery = Delivery(body.transfer, body.digests, body.bytes)
    store, pool = app_parts.store(request), app_parts.pool(request)
    return await publishing.publish(store, pool, body.version, body.epoch, delivery)


@router.get("/admin/publish/members")
async def publish_members(request: Request) -> list[Json]:
    """The engines that answer now, with the number of tensor ranks of each, and whether it can prepare versions."""
    await app_parts.access(request).require(request, Power.ADMIN)
    pool = app_parts.pool(request)
    clients = [engine.client for engine in pool.engines]
    return await members(clients, pool.pace.parallel, prepare=pool.preparations is not None)

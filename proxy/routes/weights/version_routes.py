"""The files of weight versions, `/versions/{name}/{file}`: engines read them, a trainer without a shared disk sends
them.

GET, HEAD   an admin key, or a read token of the proxy    the run's weights folder, or this host's cache
PUT         an admin key                                  piece by piece, `version.json` last: it completes the version

Every replica of a host serves the same files. A replica on another host serves those that were sent to it, so a trainer
sends a version to the proxy that it then asks to publish it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.errors import DamagedObject, RequestError, StorageError, StoreError
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.access.keyring import Keyring
from agentrl.proxy.access.request_body import BodyLimits
from agentrl.proxy.routes import app_parts
from agentrl.store.db.codec import hash_key
from agentrl.store.training import version_states
from agentrl.versions.read_tokens import is_read_token
from agentrl.versions.version_files import Shelf, VersionFiles
from agentrl.versions.version_manifest import MANIFEST_BYTES, VERSION_FILE
from agentrl.versions.version_uploads import Gap
from agentrl.versions.weights_folder import version_of

log = logging.getLogger(__name__)
PIECE_BYTES = 64 << 20
"""The largest piece of a file."""
PIECE_TIMEOUT_S = 300.0
RANGE = re.compile(r"bytes ([0-9]{1,16})-([0-9]{1,16})/([0-9]{1,16})")
RECEIVED = "X-Received"


def served(shelves: Sequence[Shelf], keys: Keyring, admin_key: str) -> VersionFiles:
    """Serves the files of `shelves` to admin keys, and to read tokens of the run's proxies."""

    def may_read(token: str, name: str) -> bool:
        now, known = time.time(), keys.get(hash_key(token))
        is_admin = known is not None and known.caller.power is Power.ADMIN and known.ends_at > now
        return is_admin or is_read_token(token, admin_key, name, now)

    return VersionFiles(shelves, may_read)


class Forwarded(Response):
    """The answer of another ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer."""
        await self._app(scope, receive, send)


async def version_file(request: Request) -> Response:
    """Read a file of a version, or a range of it; send a piece of it (PUT)."""
    name, file = request.path_params["name"], request.path_params["file"]
    if request.method == "PUT":
        await app_parts.access(request).require(request, Power.ADMIN)
        try:
            return await (_complete if file == VERSION_FILE else _receive)(request, name, file)
        except ValueError as error:
            raise RequestError(422, str(error), code="invalid_parameter") from error
    if not _may_read(request, name):
        await app_parts.access(request).require(request, Power.ADMIN)
    if request.method == "HEAD" and (received := await _partial(request, name, file)):
        return Response(status_code=404, headers={RECEIVED: str(received)})
    return Forwarded(app_parts.version_files(request))


def _may_read(request: Request, name: str) -> bool:
    """Whether a request has a token that reads a version."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and app_parts.version_files(request).allowed(token, name)


async def _receive(request: Request, name: str, file: str) -> Response:
    """Append a piece to a file. Raises ValueError, RequestError."""
    start, end = _range_of(request.headers.get("content-range"))
    body = await BodyLimits(PIECE_BYTES, PIECE_TIMEOUT_S).read(request)
    if end is not None and end - start != len(body):
        raise ValueError(f"Content-Range has {end - start} bytes, and the body {len(body)}")
    uploads = app_parts.uploads(request)
    try:
        received = await asyncio.to_thread(uploads.write, name, file, start, body)
    except Gap as gap:
        return JSONResponse({"received": gap.received, "message": str(gap)}, 409, {RECEIVED: str(gap.received)})
    except StorageError as error:
        await _remove_old(request, name, arriving=True)
        raise RequestError(507, str(error), code="not_stored") from error
    return JSONResponse({"received": received})


async def _complete(request: Request, name: str, file: str) -> Response:
    """Let a version appear whose files have all been sent. Raises ValueError, RequestError."""
    body = await BodyLimits(MANIFEST_BYTES, PIECE_TIMEOUT_S).read(request)
    try:
        manifest = await asyncio.to_thread(app_parts.uploads(request).complete, name, body)
    except DamagedObject as error:
        raise RequestError(409, str(error), code="version_incomplete") from error
    except StorageError as error:
        await _remove_old(request, name, arriving=True)
        raise RequestError(507, str(error), code="not_stored") from error
    await _remove_old(request, name)
    return JSONResponse({"name": name, "file": file, "checksum": manifest.checksum})


async def _remove_old(request: Request, name: str, *, arriving: bool = False) -> None:
    """Delete the versions that no engine will load any more, now that version `name` is here, or finds no room.

    Not after a version that is such a one itself: the trainer sends it because a delta that follows needs it. For one
    that is `arriving`, what its own delta may need stays, and the drafts of older versions go.
    """
    store, uploads = app_parts.store(request), app_parts.uploads(request)
    try:
        unneeded = await store.read(
            version_states.unneeded_folders,
            store.run_id,
            await asyncio.to_thread(uploads.names),
            keep=version_states.KEEP_VERSIONS,
            unknown=False,
            arriving=name if arriving else None,
        )
        if arriving:
            await asyncio.to_thread(uploads.remove, unneeded, drafts_until=(version_of(name) or 0) - 1)
        elif name not in unneeded:
            await asyncio.to_thread(uploads.remove, unneeded)
    except (StorageError, StoreError) as error:
        log.warning("old versions stay on this host: %s", error)


async def _partial(request: Request, name: str, file: str) -> int:
    """Bytes of a file whose version is not complete yet; 0 without any, and for a caller without an admin key."""
    if file == VERSION_FILE:
        return 0
    try:
        await app_parts.access(request).require(request, Power.ADMIN)
        return await asyncio.to_thread(app_parts.uploads(request).received, name, file)
    except (RequestError, ValueError):
        return 0


def _range_of(header: str | None) -> tuple[int, int | None]:
    """The first byte of a piece, and the byte after its last; None without a Content-Range. Raises ValueError."""
    if header is None:
        return 0, None
    found = RANGE.fullmatch(header)
    if found is None or not int(found[1]) <= int(found[2]) < int(found[3]):
        raise ValueError("Content-Range must be `bytes START-END/TOTAL`")
    return int(found[1]), int(found[2]) + 1

"""Sends version folders to a proxy that does not see the trainer's disk: `PUT /versions/NAME/FILE`, piece by piece.

    GET version.json: this one        ─► the proxy has the version
                      404, or another ─► send what its delta needs, oldest first; then its files, each from where the
                                         proxy's partial file ends; then version.json, which completes it

A version that was written again (after a resume) has another version.json. All its files are sent, and it replaces the
old one. An upload that breaks off goes on where it was, in another attempt or by another trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx

from agentrl.errors import AgentRLError, DamagedObject
from agentrl.versions.version_manifest import VERSION_FILE, VersionFile, VersionManifest, manifest_in, read_manifest

PIECE_BYTES = 16 << 20
"""Bytes of a request; the proxy takes at most 64 MiB."""
MOST_CHAIN = 1000
"""Length of the longest chain of deltas."""
MOST_CONFLICTS = 100
"""How often a file may have another length than this trainer thinks."""
NOT_FOUND, CONFLICT = 404, 409
RECEIVED = "X-Received"


class UploadRefused(AgentRLError):
    """The proxy answered a request of an upload with an error status."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text[:300]}")
        self.status = answer.status_code


def upload(http: httpx.Client, url: str, folder: Path) -> int:
    """Send a version, and those that it is made from, unless the proxy has them; returns the bytes sent.

    `http` sends an admin key, `url` is the proxy's. A folder without a manifest (an adapter) is not sent. Raises
    UploadRefused, httpx.TransportError, and OSError when a file cannot be read.
    """
    return sum(_send(http, url, at, manifest) for at, manifest in reversed(list(_missing(http, url, folder))))


def _missing(http: httpx.Client, url: str, folder: Path) -> Iterator[tuple[Path, VersionManifest]]:
    """The version and its ancestors that the proxy lacks, down to one with all tensors."""
    for _ in range(MOST_CHAIN):
        manifest = manifest_in(folder)
        if manifest is None or not _lacks(http.get(f"{url}/versions/{folder.name}/{VERSION_FILE}"), manifest):
            return
        yield folder, manifest
        if manifest.whole is not None or manifest.delta is None:
            return
        folder = folder.with_name(manifest.delta.parent)


def _lacks(asked: httpx.Response, manifest: VersionManifest) -> bool:
    """Whether the answer to a request for `version.json` says that the proxy has not this content of the version."""
    if not asked.is_success:
        return asked.status_code == NOT_FOUND
    try:
        return read_manifest(asked.content) != manifest
    except DamagedObject:
        return True


def _send(http: httpx.Client, url: str, folder: Path, manifest: VersionManifest) -> int:
    sent = sum(
        _send_file(http, f"{url}/versions/{folder.name}/{name}", folder / name, facts)
        for name, facts in manifest.files.items()
    )
    _checked(http.put(f"{url}/versions/{folder.name}/{VERSION_FILE}", content=manifest.dumps()))
    return sent


def _send_file(http: httpx.Client, url: str, path: Path, facts: VersionFile) -> int:
    """Send what the proxy lacks of a file. One of an older content that it serves under this name does not count."""
    at, sent, conflicts = _received(http.head(url)), 0, 0
    with path.open("rb") as file:
        while at < facts.size_bytes or (facts.size_bytes == 0 and not sent + conflicts):
            file.seek(at)
            piece = file.read(min(PIECE_BYTES, facts.size_bytes - at))
            answer = http.put(url, content=piece, headers=_range(at, len(piece), facts.size_bytes))
            if answer.status_code == CONFLICT and conflicts < MOST_CONFLICTS:  # somebody else sends it too
                at, conflicts = _received(answer), conflicts + 1
                continue
            _checked(answer)
            at, sent = at + len(piece), sent + len(piece)
            if not piece:
                break
    return sent


def _range(start: int, length: int, total: int) -> dict[str, str]:
    return {"Content-Range": f"bytes {start}-{start + length - 1}/{total}"} if length else {}


def _received(answer: httpx.Response) -> int:
    """Bytes of a file that the proxy has."""
    text = answer.headers.get(RECEIVED, "0")
    return int(text) if text.isdecimal() else 0


def _checked(answer: httpx.Response) -> None:
    if not answer.is_success:
        raise UploadRefused(answer)

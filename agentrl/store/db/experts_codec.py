"""Packs the experts that an engine chose at the positions of a call.

Experts are stored as the gaps of ascending ids, ordered by their place in the set, which compresses best.
"""

from __future__ import annotations

import numpy as np

from agentrl.domain.experts.routed_experts import RoutedExperts
from agentrl.store.db import codec

_HEAD = np.dtype([("layers", "<u2"), ("top_k", "<u2"), ("width", "u1")])


def pack(experts: RoutedExperts) -> bytes:
    """The experts as zstd: sizes, origins, then the gaps: first all low bytes, then all high bytes if there are any."""
    _, layers, top_k = experts.ids.shape
    width = experts.ids.dtype.itemsize
    head = np.array((layers, top_k, width), _HEAD).tobytes()
    gaps = experts.ids.copy()
    gaps[..., 1:] -= experts.ids[..., :-1]
    by_place = np.ascontiguousarray(gaps.transpose(2, 1, 0)).astype(f"<u{width}", copy=False)
    planes = by_place.reshape(-1).view(np.uint8).reshape(-1, width).T
    return codec.compress(head + experts.origins.tobytes() + planes.tobytes())


def unpack(blob: bytes) -> RoutedExperts:
    """Inverse of `pack`. Raises ValueError for other bytes."""
    raw = codec.decompress(blob)
    head = np.frombuffer(raw, _HEAD, 1)[0]
    layers, top_k, width = int(head["layers"]), int(head["top_k"]), int(head["width"])
    rows, rest = divmod(len(raw) - _HEAD.itemsize, 1 + layers * top_k * width)
    if rest:
        raise ValueError(f"{len(raw)} bytes are no experts of {layers} layers with {top_k} each")
    origins = np.frombuffer(raw, np.uint8, rows, _HEAD.itemsize)
    planes = np.frombuffer(raw, np.uint8, offset=_HEAD.itemsize + rows).reshape(width, -1)
    gaps = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(top_k, layers, rows)
    ids = np.cumsum(gaps, axis=0, dtype=f"u{width}").transpose(2, 1, 0)
    return RoutedExperts(np.ascontiguousarray(ids), origins.copy())

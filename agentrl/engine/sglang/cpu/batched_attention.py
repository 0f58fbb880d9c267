"""Attention over a paged key/value cache: new tokens only, and one call for requests of similar length. Imports torch.

    decode:  one new token per request.     requests ──by length──► groups of at most SPREAD ──► one call each
    extend:  N new tokens after a prefix.   one call per request, over the new tokens only

Shapes: H query heads, K key/value heads, D their size, R rows of the cache, B requests, T positions, N new tokens.
Each request names the rows of its positions, in order. The new tokens are in the cache already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SPREAD = 1.5
"""How many times as long as the shortest request of a group the longest one may be."""
SHORT = 64
"""Requests up to this length are not divided."""
Biases = dict[tuple[int | None, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests that attend in one call. Positions after a request's end are row 0, and masked."""

    requests_B: Tensor  # their places in the batch
    lengths_B: Tensor
    rows_BT: Tensor
    _biases: Biases = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, (B, 1, 1, T): 0 for the positions that the last token sees, else -inf.

        With a `window` it sees itself and that many tokens before it.
        """
        found = self._biases.get((window, dtype))
        if found is None:
            positions_T = torch.arange(self.rows_BT.shape[1])
            last_B1 = self.lengths_B[:, None] - 1
            seen_BT = positions_T <= last_B1
            if window is not None:
                seen_BT &= positions_T >= last_B1 - window
            found = self._biases[window, dtype] = _bias(seen_BT, dtype)[:, None, None, :]
        return found


@dataclass(frozen=True, slots=True)
class Extension:
    """One request with N new tokens after `prefix` cached ones."""

    begin: int  # of its new tokens in the batch's
    end: int
    rows_T: Tensor  # of the prefix and the new tokens
    prefix: int
    _biases: Biases = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores, (N, T); None where a causal mask without a prefix does the same."""
        if window is None and self.prefix == 0:
            return None
        found = self._biases.get((window, dtype))
        if found is None:
            keys_T = torch.arange(len(self.rows_T))
            queries_N1 = torch.arange(self.prefix, len(self.rows_T))[:, None]
            seen_NT = keys_T <= queries_N1
            if window is not None:
                seen_NT &= keys_T >= queries_N1 - window
            found = self._biases[window, dtype] = _bias(seen_NT, dtype)
        return found


def decode_groups(rows: Tensor, places: Tensor, lengths: Sequence[int]) -> list[DecodeGroup]:
    """Divide requests by length. `rows` has a line for each place, of which a request uses its first `length` rows."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    for request in order:
        if groups and lengths[request] <= max(SHORT, SPREAD * lengths[groups[-1][0]]):
            groups[-1].append(request)
        else:
            groups.append([request])
    return [_group(rows, places, lengths, requests) for requests in groups]


def _group(rows: Tensor, places: Tensor, lengths: Sequence[int], requests: list[int]) -> DecodeGroup:
    requests_B = torch.tensor(sorted(requests))
    lengths_B = torch.tensor([lengths[request] for request in sorted(requests)])
    longest = int(lengths_B.max())
    rows_BT = rows[places[requests_B], :longest].long()
    rows_BT[torch.arange(longest) >= lengths_B[:, None]] = 0  # rows after the end are of other requests, or none
    return DecodeGroup(requests_B, lengths_B, rows_BT)


def extensions(rows: Tensor, places: Tensor, prefixes: Sequence[int], new: Sequence[int]) -> list[Extension]:
    """The requests of a batch whose new tokens follow each other."""
    found, begin = [], 0
    for place, prefix, n_new in zip(places.tolist(), prefixes, new, strict=True):
        rows_T = rows[place, : prefix + n_new].long()
        found.append(Extension(begin, begin + n_new, rows_T, prefix))
        begin += n_new
    return found


def attend_last(
    query_BHD: Tensor,
    output_BHD: Tensor,
    keys_RKD: Tensor,
    values_RKD: Tensor,
    groups: Sequence[DecodeGroup],
    *,
    scale: float,
    window: int | None = None,
) -> None:
    """Attention of the last token of each request over all its tokens, into `output_BHD`.

    The query heads of one key/value head are attended together, as if they were several tokens.
    """
    heads, kv_heads = query_BHD.shape[1], keys_RKD.shape[1]
    for group in groups:
        query = query_BHD[group.requests_B].view(-1, kv_heads, heads // kv_heads, query_BHD.shape[2])
        out = scaled_dot_product_attention(
            query,
            keys_RKD[group.rows_BT].to(query.dtype).transpose(1, 2),
            values_RKD[group.rows_BT].to(query.dtype).transpose(1, 2),
            attn_mask=group.bias(window, query.dtype),
            scale=scale,
        )
        output_BHD[group.requests_B] = out.reshape(-1, heads, output_BHD.shape[2])


def attend_new(
    query_NHD: Tensor,
    output_NHD: Tensor,
    keys_RKD: Tensor,
    values_RKD: Tensor,
    requests: Sequence[Extension],
    *,
    scale: float,
    window: int | None = None,
) -> None:
    """Causal attention of the new tokens of each request over its prefix and themselves, into `output_NHD`."""
    for request in requests:
        query = query_NHD[request.begin : request.end].transpose(0, 1)[None]
        bias = request.bias(window, query.dtype)
        out = scaled_dot_product_attention(
            query,
            keys_RKD[request.rows_T].to(query.dtype).transpose(0, 1)[None],
            values_RKD[request.rows_T].to(query.dtype).transpose(0, 1)[None],
            attn_mask=bias,
            is_causal=bias is None,
            scale=scale,
            enable_gqa=query_NHD.shape[1] != keys_RKD.shape[1],
        )
        output_NHD[request.begin : request.end] = out[0].transpose(0, 1)


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)

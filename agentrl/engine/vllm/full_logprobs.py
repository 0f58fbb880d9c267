"""Logprobs of the whole distribution, as SGLang reports them: after temperature, biases, penalties and grammars, before
top-k, top-p and min-p. vLLM's `processed_logprobs` are those of what is left behind them. Imported where vLLM samples.
"""

from __future__ import annotations

from typing import Any

GREEDY_BELOW = 1e-5
"""vLLM's temperature of greedy rows, which it does not scale."""


def report(sampler: Any) -> None:
    """Change vLLM's class of the sampler that its V1 model runner has."""
    restricted = sampler.sample

    def sample(self: Any, logits: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        full = _full(self, logits, metadata)
        sampled, processed = restricted(self, logits, metadata, *args, **kwargs)
        return sampled, full if full is not None and processed is not None else processed

    sampler.sample = sample


def _full(sampler: Any, logits: Any, metadata: Any) -> Any:
    """The logprobs of a batch that is restricted; None for one that is not, whose logprobs vLLM gives."""
    if metadata.all_greedy or metadata.max_num_logprobs is None or not _is_restricted(metadata):
        return None
    temperatures = metadata.temperature
    scales = temperatures.where(temperatures >= GREEDY_BELOW, temperatures.new_ones(()))
    return sampler.compute_logprobs(logits / scales[:, None])


def _is_restricted(metadata: Any) -> bool:
    if metadata.top_k is not None or metadata.top_p is not None:
        return True
    return any(getattr(each, "min_p_count", 0) for each in metadata.logitsprocs.argmax_invariant)


def report_on_gpu(sampler: Any, states: Any) -> None:
    """Change vLLM's classes of the sampler that its V2 model runner has, and of that sampler's states."""
    sample, sample_random, apply_min_p = sampler.sample, sampler._sample_random, states.apply_min_p

    def with_min_p(self: Any, logits: Any, expanded: Any, rows: Any) -> None:
        if (self.min_p.np[rows] != 0.0).any():
            self.whole = logits.clone()
        apply_min_p(self, logits, expanded, rows)

    def with_top(
        self: Any, logits: Any, expanded: Any, rows: Any, pos: Any, top_k: Any, top_p: Any, fused: bool
    ) -> Any:
        if self.sampling_states.whole is None and (top_k is not None or top_p is not None):
            self.sampling_states.whole = logits.clone()
        return sample_random(self, logits, expanded, rows, pos, top_k, top_p, fused)

    def with_whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.sampling_states.whole = None
        sampled, processed = sample(self, *args, **kwargs)
        whole, self.sampling_states.whole = self.sampling_states.whole, None
        return sampled, processed if whole is None else whole

    sampler.sample, sampler._sample_random, states.apply_min_p = with_whole, with_top, with_min_p

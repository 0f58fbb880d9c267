"""Write docs/algorithms.md from the presets: `python scripts/algorithm_reference.py > docs/algorithms.md`."""

from __future__ import annotations

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.presets import PRESETS

HEAD = """# Algorithms

An algorithm is a choice of parts. `trainer.algorithm` names a preset, or a preset with some of its parts changed:

```yaml
trainer:
  algorithm: dapo
```
```yaml
trainer:
  algorithm: {preset: grpo, clip_high: 0.28, aggregation: token_mean}
```

On the command line `trainer.algorithm=dapo trainer.algorithm.clip_high=0.3` does the same. Every part, its values and
what it means is in the [configuration](config.md#traineralgorithm). Values that do not fit together are
refused when the configuration is read.

## The loss

A batch's loss is `Σ_t a_t · (w_t · L(ρ_t, A_t) + β · KL_t − η · H_t)` over its loss tokens, all of them in packed
1-D tensors:

| symbol | part | what |
| --- | --- | --- |
| A | `credit`, `baseline`, `normalization` | advantage: of the token's turn, or of its whole episode |
| ρ | `ratio`, `proximal` | current policy / proximal policy, of a token, a turn or a trajectory |
| L | `clip` | the surrogate: what a ratio and an advantage cost |
| w | `correction` | proximal policy / behaviour policy: truncated, masked or rejected; no gradient |
| a | `aggregation` | one over tokens, or over trajectories and their lengths |
| KL, H | `kl`, `entropy_coef` | divergence from a reference policy, entropy |

The *behaviour* policy is what sampled a token, as the engine recorded it; the *proximal* policy is the one just before
the step. Their ratio w corrects for data that is older than the step, and for what engine and trainer compute
differently; ρ bounds how far the step goes. With one minibatch a step the policy has not moved when its loss is
computed, and ρ is 1. `proximal: recompute` costs a forward pass with several minibatches, `interpolate` none;
`m2_threshold` costs one of each minibatch (`masked_fraction` says what it leaves out).

A *sequence* is a trajectory: the loss tokens of one path through a session's calls, whatever lies between them. All
totals (tokens, trajectories, M2PO's second moment) are of the whole minibatch, so that losses and gradients do not
depend on how it is cut into microbatches or spread over ranks.

**What counts.** Loss tokens are sampled by the policy from an unmodified distribution, by weights within the bound on
staleness. A loss token that `correction: mask` or `reject`, or `m2_threshold`, then leaves out has loss 0 and still
counts in the denominator (tokens, its trajectory's length, trajectories); so does a trajectory whose tokens are all
left out.
verl's rejection and AReaL's M2PO take such tokens out of the loss mask before the mean: with a share f kept, their
`token_mean` is ours divided by f, and their mean over a trajectory is over its kept tokens alone. Ours
keeps each token's weight, so that a batch with few tokens left moves the policy less, not more; the learning rate that
matches theirs is ours over f (`masked_fraction` is 1 − f of M2PO, `behavior_weight_capped` of corrections; AdamW and
`grad_clip` undo part of the difference). KL and entropy of a token that is left out still count.

Ratios of a turn or a sequence are geometric means, in GSPO's token form: where all tokens of a trajectory have the same
advantage, value and gradient are GSPO's, and where turns differ, each token's gradient carries its own turn's.
`product` is the ratio of the whole trajectory as one action.

Differences of log probabilities are bounded before they become ratios: ρ and w are exponentials of at most ±20 (as in
verl), the estimator k3 is at most 10 (as in verl and AReaL). Between the bounds the formulas are exact; at one the
token has no gradient. For a token that `m2_threshold` leaves out, log ρ is set to 0 before the exponential, so that
an infinite value does not reach the gradient. k1, k2 and the losses of pairs have no exponential that can overflow, and
no bound.

## Advantages

A group-relative baseline counts each episode of a group once, however many paths it has. A group of one has nothing to
be compared with, and a group of equal returns teaches nothing: their advantages are 0 (`whiten` then shifts those of
the tied group with all the others).

Returns are float64 throughout. Two returns are equal if they differ by at most 1e-9 · max(1, |R|), so that the order in
which rewards are added does not matter. The lease, the trainer and recorded pairs use the same definition.

`dynamic_sampling` goes further: a tied group, or one of one session, is never leased. It becomes `stale` with the
reason `tied`, its admission is given back, and the step waits for another group in its place. What counts is the
recorded return, before overlong shaping.

**Discounted turns.** With `rollout.turn_discount` γ below 1 and `credit: turn`, a turn's advantage is its own return,
R_i = r_i + γ R_{i+1}, against a baseline of first turns' returns, γ^(n−1) r for an episode of n turns that ends with
reward r. Where the episodes of a group differ in n, the last turns are therefore far above the baseline on every path,
even in the longest episode: of two that both earn 1, in one turn and in six at γ = 0.9, the baseline is 0.80,
the long one's first turn has 0.59 and its last 1. With equal numbers of turns and equal rewards the group is tied and
nothing is learned from it. `turn_discount: 1`, `credit: trajectory` (the discounted return of the episode for all its
turns: shorter is better) and a critic (`ppo`, which expects each turn's return) do not have this; `agentrl train`,
`agentrl trainer` and `agentrl run create` say so once where it applies.

Overlong shaping lowers the return of an episode by its longest path's sampled tokens n: by 0 up to L − B, by
`p (n − (L − B)) / B` after that, by p from L on (`overlong_tokens` L, `overlong_buffer` B, `overlong_penalty` p).
Recorded rewards and returns stay as they were.

## The critic

With `ppo` a critic says of each state what return it expects, and generalised advantage estimation compares what came
after it. A state is all that comes before a sampled token; a trajectory's loss tokens are its time, whatever lies
between them, and γ and λ (`gae_gamma`, `gae_lambda`) count per loss token. The last loss token of a turn is paid the
turn's return less that of the next turn with loss tokens, so that undiscounted, from a turn on, rewards are its return
in sum; with `credit: trajectory` the last loss token of all is paid the episode's. After it comes nothing: its next
value is 0. Targets are advantage + value, before advantages are whitened.

It is a model of its own: the base model's body with as many trained layers as the policy, and a linear head that starts
at 0. Its values are computed before the step. It learns from the same minibatches at `critic_lr`: ½ max((V − T)²,
(V_old + clip(V − V_old, ±`value_clip`) − T)²), mean over tokens. Checkpoints hold it and its moments. `value_loss`,
`value_grad_norm` and `explained_variance` (1 − Var(T − V)/Var(T), of the values before the step) say how it does.

Samples that share their first tokens share states and values, which are computed once; advantages are each their own.

## The reference policy

With `kl_coef` β the divergence KL from a reference policy counts, estimated at each loss token from d = log π −
log π_ref: `k1` d, `k2` d²/2, `k3` min(exp(−d) − 1 + d, 10). With `kl: loss` β·KL is added to the token's loss. With
`kl: reward` it is taken from returns before advantages are made of them, with π as it is before the step: a token's
return loses what it and the tokens after it in its trajectory cost; with `credit: trajectory`, and in baselines and
scales, an episode's return loses all that its tokens cost. `kl_reference` is the mean estimate over loss tokens.

The reference is the base model, or what `trainer.reference` names: a model's folder, a checkpoint or a published
version. With `kl_refresh_steps` N it becomes the policy after every N-th step, and checkpoints hold it. In memory it is
one more copy of the trained parameters, as sharded as they are: for its forward pass, without gradients, they change
places with the policy's, so that frozen layers exist once.

What a critic or a reference said of tokens is not stored: `agentrl replay` checks the batches of such runs, and cannot
say what their advantages would have been under another credit (with `kl: loss` it can)."""

TAIL = """## Adding one

A new choice of parts is one entry in `agentrl/configs/presets.py`, and its formula in
`tests/trainer/algorithms/test_presets.py`, which compares loss and gradient with it.
A new part is a function beside its kind in `trainer/algorithms/` and a value in `agentrl/configs/algorithm.py`.

This page is generated from the presets by `scripts/algorithm_reference.py`."""

COLUMNS = ("credit", "baseline", "normalization", "ratio", "clip", "proximal", "correction", "aggregation")


def main() -> None:
    """Print the page."""
    print("\n\n".join([HEAD, formulas(), parts(), TAIL]))


def formulas() -> str:
    """One row a preset: what it computes, and where that is from."""
    rows = []
    for name, preset in PRESETS.items():
        differs = f"; {preset.differs}" if preset.differs else ""
        formula = preset.formula.replace("|", "\\|")  # a bar ends a cell
        rows.append(f"| `{name}` | {preset.title} | {formula} | {preset.paper}{differs} |")
    head = ["## Presets", "", "| preset | | formula | from |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


def parts() -> str:
    """One row a preset: its parts, and its settings that are not GRPO's."""
    rows = []
    for name, preset in PRESETS.items():
        algorithm = Algorithm(preset=name)
        cells = [_cell(algorithm, column) for column in COLUMNS]
        others = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in preset.parts.items() if key not in COLUMNS)
        rows.append(f"| `{name}` | {' | '.join(cells)} | {others} |")
    head = [
        "Their parts, and what else they set:",
        "",
        f"| preset | {' | '.join(COLUMNS)} | |",
        "| --- |" + " --- |" * (len(COLUMNS) + 1),
    ]
    return "\n".join([*head, *rows])


def _cell(algorithm: Algorithm, column: str) -> str:
    value = str(getattr(algorithm, column))
    if column == "correction" and value != "none":
        return f"{value} ({algorithm.correction_level})"
    return value


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()

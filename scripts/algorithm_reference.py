"""Write docs/algorithms.md from the presets: `python scripts/algorithm_reference.py > docs/algorithms.md`."""

from __future__ import annotations

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.presets import PRESETS

HEAD = """# Algorithms

An algorithm is a combination of parts. `trainer.algorithm` is the name of a preset, or a preset with some parts
changed:

```yaml
trainer:
  algorithm: dapo
```
```yaml
trainer:
  algorithm: {preset: grpo, clip_high: 0.28, aggregation: token_mean}
```

On the command line, write `trainer.algorithm=dapo trainer.algorithm.clip_high=0.3`. The
[configuration](config.md#traineralgorithm) describes every part and its values. Values that do not fit together are
refused when the configuration is read.

## The loss

The loss of a batch is `Σ_t a_t · (w_t · L(ρ_t, A_t) + β · KL_t + c · D_t − η · H_t)` over its loss tokens, which are
stored in packed 1-D tensors:

| symbol | part | meaning |
| --- | --- | --- |
| A | `credit`, `baseline`, `normalization` | advantage of the token's turn, or of its whole episode |
| ρ | `ratio`, `proximal` | current policy / proximal policy, for a token, a turn or a trajectory |
| L | `clip` | the surrogate loss of a ratio and an advantage |
| w | `correction` | proximal policy / behaviour policy: truncated, masked or rejected; without gradient |
| a | `aggregation` | 1 / number of tokens, or 1 / (number of trajectories · their lengths) |
| KL, H | `kl`, `entropy_coef` | divergence from a reference policy; entropy |
| D | `distill: full` | divergence from the teacher's distribution; c is `distill_coef` |

The *behaviour* policy sampled the token; its probabilities are those that the engine recorded. The *proximal* policy
is the policy just before the step. Their ratio w corrects for data that is older than the step, and for numerical
differences between engine and trainer. ρ limits how far one step changes the policy. With one minibatch per step ρ is
1, because the policy has not changed when the loss is computed. With several minibatches, `proximal: recompute` costs
one forward pass and `interpolate` costs none. `m2_threshold`, `clip_cov`, `kl_cov`, `correction_normalize` and
`masked_in_mean` depend on figures of the whole minibatch, which cost one more forward pass of it
(`masked_fraction` is the share of tokens that the first two mask).

A *sequence* is a trajectory: the loss tokens of one path through a session's calls, without the tokens between them.
All totals (tokens, trajectories, M2PO's second moment) are taken over the whole minibatch. Losses and gradients
therefore do not depend on its division into microbatches and ranks.

**Masked tokens stay in the denominator.** Loss tokens were sampled by the policy from an unmodified distribution,
with weights within the staleness limit. If `correction: mask`, `correction: reject` or `m2_threshold` masks a loss
token, its loss is 0, but it still counts in the denominator (tokens, its trajectory's length, trajectories). So does
a trajectory whose tokens are all masked. KL and entropy of a masked token still count.

verl's rejection and AReaL's M2PO remove such tokens from the loss mask before the mean. `masked_in_mean: trajectories`
is verl's: masked tokens have neither KL nor entropy in the loss and are in no number of tokens, but a trajectory whose
tokens are all masked still counts as a trajectory, so rejecting whole trajectories makes `sequence_mean` smaller and
`token_mean` not. With `none`, such a trajectory is in no denominator either. With the default, if a
share f of the tokens is kept, their `token_mean` is ours divided by f, and their mean over a trajectory is over its
kept tokens only. Ours keeps each token's weight, so a batch with few tokens left changes the policy less. The learning
rate that matches theirs is ours divided by f. For M2PO, f is 1 − `masked_fraction`; for corrections it is 1 −
`behavior_weight_capped`. AdamW and `grad_clip` undo part of the difference.

Ratios of a turn or a sequence are geometric means, in GSPO's token form. If all tokens of a trajectory have the same
advantage, value and gradient equal GSPO's. If turns have different advantages, each token's gradient uses the
advantage of its own turn. `product` is the ratio of the whole trajectory as one action.

Differences of log probabilities are clamped before the exponential: to ±20 for ρ and w (as in verl). The estimator k3
is clamped to at most 10 (as in verl and AReaL). Within these bounds the formulas are exact; at a bound the token has
no gradient. For a token that `m2_threshold` masks, log ρ is set to 0 before the exponential, so an infinite value
does not reach the gradient. k1, k2 and the losses of pairs have no exponential that can overflow, so they are not
clamped.

## Advantages

A group-relative baseline counts each episode of a group once, whatever its number of paths. In a group of one
episode, and in a *tied* group (all returns are equal), the advantages are 0. `whiten` then shifts the advantages of a
tied group together with all others.

Returns are float64 throughout. Two returns are equal if they differ by at most 1e-9 · max(1, |R|), so that the order in
which rewards are added does not matter. The lease, the trainer and recorded pairs use the same definition.

With `dynamic_sampling` a tied group, or a group of one session, is never leased. It becomes `stale` with the reason
`tied`, its place in admission is released, and the step waits for another group instead. The comparison uses the
recorded returns, before overlong shaping.

**Discounted turns.** With `rollout.turn_discount` γ below 1 and `credit: turn`, a turn's advantage is its own
return, R_i = r_i + γ R_{i+1}, against a baseline of first turns' returns, γ^(n−1) r for an episode of n turns that
ends with reward r. If the episodes of a group differ in n, the last turns are far above the baseline, even in the
longest episode. For example, two episodes have reward 1, one with one turn and one with six turns, and γ is 0.9. The
baseline is 0.80; the long episode's first turn has the return 0.59 and its last turn has 1. If numbers of turns and
rewards are equal, the group is tied and has no effect. Three settings avoid this bias: `turn_discount: 1`; `credit:
trajectory`, in which all turns have the discounted return of the episode, so shorter episodes are better; and a
critic (`ppo`), which predicts each turn's return. `agentrl train`, `agentrl trainer` and `agentrl run create` print
a warning once if the bias applies.

Overlong shaping reduces the return of an episode by the number n of sampled tokens of its longest path: by 0 up to
L − B, by `p (n − (L − B)) / B` between L − B and L, and by p from L on (`overlong_tokens` L, `overlong_buffer` B,
`overlong_penalty` p). Recorded rewards and returns do not change.

**Successes and failures apart.** `positive_weight` and `negative_weight` multiply advantages of that sign, after all
else: `negative_weight: 0` learns from successes only, `positive_weight: 0` from failures only; `positive_weight: 0.1`
is W-REINFORCE, which keeps the entropy higher. `baseline_shift` δ is added to baselines: below 0 it counts successes
more (AsymRE); with `baseline: none`, 0.5 makes rewards of 0 and 1 those of −½ and ½. `rescale_tied` multiplies the
advantages by the number of episodes over that of episodes in groups with spread, so a batch of many tied groups changes
the policy as much as one of few.

**A greedy baseline.** `baseline: greedy` (ReMax) gives each group of the run's tasks one more episode, whose calls the
proxy samples at temperature 0 whatever its agent asks, its sub-agents' calls included. Its return is the baseline of
the group's samples; rewards may still change it until the group is leased. Nothing of it is trained: its trajectories
are `rejected` with the reason `baseline`, it is no sample of the group (`min_group_size`, `rollout.accept`, a
curriculum's success rates), and `reward/greedy` is its only metric. A group whose greedy episode failed, was rejected
or has no reward is rejected with the reason `its greedy episode failed or has no reward`, and another starts in its
place; `rollout.max_failures_in_a_row` greedy episodes that fail one after another stop the run (one that completes
without a reward has not failed). A ready group that began before the run had this baseline is rejected as well. Groups
work with `group_size: 1` and `min_group_size: 1`. Programs that bring their own tasks (`POST /sessions`, AReaL's
routes) are refused with `needs_greedy_episode`, since their groups have no such episode; those that start groups with
`POST /groups` play the session with `is_baseline: true` as any other.

**The best of k.** `baseline: max_at_k` raises the expected maximum of `best_of` k episodes instead of the mean: an
episode's advantage is k times the mean of what it adds to the maximum of k − 1 others of its group. For rewards of 0
and 1 that is pass@k. Advantages are never negative, and 0 for all but the best few. The policy keeps solutions that
differ; its mean reward rises more slowly. `best_of` is at most `rollout.group_size`, and groups should be larger
than it.

**Several rewards.** `normalization: per_reward` (GDPO) divides the rewards of each name by their own deviation within
the group before they are summed by `reward_weights`, so a reward of large numbers does not hide one of small numbers,
and two episodes with the same sum differ if their rewards do. The sum is whitened over the batch. A reward that an
episode lacks counts as 0; the overlong penalty is a reward named `overlong`. The weights of `reward.components` have no
effect then, because each reward is divided by its own deviation.

**Steps in the same state.** `step_weight` ω (GiGPO) adds ω times a second advantage to each call: its own return among
the calls of its group whose prompts have the same tokens, normalised by their deviation. Episodes of a group all begin
in one state; further ones are equal where agents act alike, for example in games with few states. A call that is alone
in its state adds 0.

### Filters

`rollout.accept: module:function` decides for each training group, when its last episode ends, whether it trains:

```python
def varied(task, rewards):
    # train groups whose rewards differ by at least 0.2; a text is the reason that is stored
    return max(rewards, default=0) - min(rewards, default=0) >= 0.2 or "the rewards are too close"
```

It gets the task and the summed rewards of the episodes that have one; failed and rejected episodes are left out. It
returns whether the group trains, or the reason why not. The trajectories of such a group are `rejected` with this
reason (`rejected: the rewards are too close`), and another group starts in its place. An exception rejects the group,
with the exception as the reason. The function runs in a thread of the rollout worker and should take milliseconds.

## The critic

With `ppo` a critic predicts the return of each state, and generalised advantage estimation compares the prediction
with the rewards that followed. A state is the text before a sampled token. The time steps of a trajectory are its
loss tokens, so γ and λ (`gae_gamma`, `gae_lambda`) apply per loss token. The last loss token of a turn is rewarded
with the turn's return minus the return of the next turn with loss tokens; from any turn on, the undiscounted sum of
these rewards is the turn's return. With `credit: trajectory` the trajectory's last loss token is rewarded with the
episode's return. The value after the last loss token is 0. Targets are advantage + value, before advantages are
whitened.

With `advantage_level: turn` the time steps are the turns (Turn-PPO, arXiv 2512.17008): a turn's reward is the sum of
its tokens' rewards, its value is that of the state before its first loss token, and all of its tokens have its
advantage. γ and λ then apply per turn, and the critic learns only the values of those states, in a mean over turns.
With tokens as time steps and λ below 1, the first tokens of a long answer depend little on the reward after it.

The critic is a separate model: the base model's body with as many trained layers as the policy, and a linear head
that starts at 0. Its values are computed before the step. It learns from the same minibatches at `critic_lr`: ½
max((V − T)², (V_old + clip(V − V_old, ±`value_clip`) − T)²), mean over tokens. Checkpoints contain the critic and its
optimizer moments. `value_loss`, `value_grad_norm` and `explained_variance` (1 − Var(T − V)/Var(T), with the values
before the step) measure it.

In the first `critic_warmup_steps` steps only the critic learns: the policy is measured and published as it is.
`critic_lr_schedule` gives the critic a schedule of its own.

`trainer.critic_from` names the folder of a model that `agentrl reward-model` trained. The critic then starts with the
reward model's body and head, so its first values are the scores of the states, in the reward model's scale. A folder of
another architecture, with another tokenizer or with another number of outputs is refused by name. A few
`critic_warmup_steps` fit the scale of the values to that of the returns.

Samples with the same first tokens share states and values, which are computed once; each sample has its own advantages.

### Truncated episodes

An episode that a limit ended has not ended for the task: more reward could have followed. By default the value after
the last loss token is 0 all the same, which teaches a critic that the states before a limit are worth nothing.
`bootstrap_truncated: true` takes the critic's value of the state after the episode's last token instead (arXiv
1712.00378), which costs one more predicted token for each such episode. Recorded facts decide: the episode's last main
call has the `finish_reason` `length`, or its agent has said `truncated` at the session's end ([REST](rest.md),
`Result.truncated`). Of the ready-made agents, `tool_agent` says so after `max_turns`, `max_tokens` and a full context;
`multi_turn`, OpenEnv and Gymnasium environments do so when their turns have run out or the context is full, and
Gymnasium also when the environment truncates. An episode that exceeds `rollout.timeout_s` fails and is never trained.
In an episode with several paths, only the path of the last main call goes on in the value; sessions of sub-agents end
with their parent. `truncated_episodes` is the share of such episodes. Leave it off where the limit is a part of the
task, for example a question that must be answered in three attempts.

## The reference policy

`kl_coef` β weighs the KL divergence from a reference policy. It is estimated at each loss token from d = log π − log
π_ref: `k1` is d, `k2` is d²/2, `k3` is min(exp(−d) − 1 + d, 10). As a term of the loss, the gradient of k1 is 0 on
average and that of k3 is biased; `k1+` and `k3+` have their values and the gradient of k2, which is the divergence's.
With `kl: loss`, β·KL is added to the token's loss. With `kl: reward`, β·KL is subtracted from returns before advantages
are computed, with π before the step. A token's return is reduced by the β·KL of the token itself and of all later
tokens of its trajectory. With `credit: trajectory`, and in baselines and scales, an episode's return is reduced by the
β·KL of all its tokens. The return of a greedy episode (`baseline: greedy`) is not reduced, as in verl: its tokens are
never computed. `kl_reference` is the mean estimate over loss tokens.

With `kl_target`, a controller changes `kl_coef` after each step so that `kl_reference` stays at the target, and starts
at the configured value: β ← β (1 + `kl_gain` · clip(`kl_reference`/target − 1, ±0.2)), as in arXiv 1909.08593, section
2.2. verl's and TRL's gain is episodes of a step / horizon. The metric `kl_coef` is the weight of the step; checkpoints
contain it.

The reference is the base model, or the one that `trainer.reference` names: a model's folder, a checkpoint or a
published version. With `kl_refresh_steps` N, the policy becomes the new reference after every N-th step, and
checkpoints contain the reference. In memory the reference is one more copy of the trained parameters, sharded like
them. For its forward pass, which has no gradients, the copy is swapped with the policy's parameters, so frozen layers
are in memory once.

## Distillation

A teacher scores the tokens that the student sampled, so the student learns on the states that it visits itself
(on-policy distillation). `trainer.teacher` names the teacher. It may be larger and of another architecture, but must
have the student's tokenizer: another one is refused, with the first token that differs. `distill_coef` c is the weight
of the divergence:

```yaml
trainer:
  teacher: /models/Qwen3-8B
  algorithm: {preset: grpo, distill_coef: 1.0, reward_weight: 0.0}
```

| `distill` | what each loss token gets | what it costs |
| --- | --- | --- |
| `sampled` | −c (log π − log π_teacher) in its advantage, π before the step | a forward pass of teacher and student |
| `full` | c · D in its loss, D over the vocabulary | a forward pass of the teacher, logits of both models twice |

`sampled` is an unbiased estimate of the gradient of the reverse KL divergence at the visited states, and has the
algorithm's ratio, clip and correction. A token costs its own divergence only, not that of later tokens. `full` has no
sampling noise: `distill_divergence` is `reverse` (it seeks the teacher's modes), `forward` (it covers them) or
`jensen_shannon`, and `distill_top_k` compares only the teacher's k likeliest tokens. Both take the tokens' sampling
temperature for both models, count masked tokens as any loss does, and add to the rewards: `reward_weight` is the factor
of the advantages that come from rewards, and 0 leaves only the teacher. With a
`distill_coef` above 0 all groups teach, those with equal rewards too, unless `dynamic_sampling` drops them.
`kl_teacher` is the mean divergence over the `tokens_taught`, the loss tokens that a teacher has scored.

With `distill: sampled` the store keeps the teacher's logprob of each token beside the others of its trainer
(`teacher_logprob`, [facts of tokens](data.md#facts-of-single-tokens)), for the steps and trajectories that
`trainer.token_facts` keeps: all by default. `agentrl replay` reads them: the advantages of a taught step are recomputed
byte for byte, and under another credit with the same teacher.

The figure shows SmolLM2-135M with noise on its weights (0.1 deviations of each tensor), three seeds, four minibatches a
step. With `distill: full` it reaches 95 % of the teacher's held-out reward after 2,405, 4,449 and 3,405 loss tokens.
From rewards alone it needs 9,296 and 9,222 with the first and the third seed, and has not reached it after 12,467 with
the second: 3.9, more than 2.8 and 2.7 times as many (`benchmarks/distillation.py`).

![Held-out reward by loss tokens, from the teacher and from rewards](assets/distillation.png)

A teacher that the trainer loads has the precision and the sharding of the policy, never learns, and is in no
checkpoint. `distill: full` needs `resources.trainer.context: 1`. To learn from what another model has sampled, see
[distillation from a run](tuning.md#distillation-from-a-run).

The outputs of a critic or a reference are not stored. `agentrl replay` checks the batches of such runs, but cannot
compute their advantages under another credit (with `kl: loss` it can).

### Teachers of single sources

`trainer.teacher` may give each [source of tasks](tasks.md) its own teacher. Each model is loaded once, and scores only
the trajectories of its sources. A source without a teacher is not distilled: its tokens have no distillation term.

```yaml
tasks: [{path: data/maths.jsonl, name: maths}, {path: data/code.jsonl, name: code}, data/chat.jsonl]
trainer:
  teacher: {maths: /models/maths-32b, code: upstream:coder}
  algorithm: {preset: grpo, distill_coef: 1.0}
```

The source of a task is the entry of `tasks` that it came from, whatever its data say; tasks that programs bring have
none.

### Privileged prompts

`trainer.teacher_prompt` lets the teacher read more than the student: a hint, the solution, feedback. It is the name of
a field of the task, whose text follows the last user message after an empty line, or `module:function`:

```python
def with_solution(task, messages):
    if "solution" not in task:
        return None  # this trajectory is not distilled
    return [*messages, {"role": "user", "content": f"A correct solution is: {task['solution']}. Solve it yourself."}]
```

The function gets the task and the messages of the trajectory's first call, and returns those that the teacher reads.
They are rendered as the recorded prompt was, with its tools, its choice of thinking and the beginning of a forced tool
call; from the first sampled token on, the teacher reads the student's own tokens, byte for byte. So in a trajectory of
several turns the privileged text stands in the first prompt, and all later turns follow it. Nothing else is rendered
again: outputs, tool results and later messages are the recorded ones.

The teacher may be the policy itself, `trainer.teacher: policy`, with the weights that it has in the step and without a
gradient: the model learns to answer without the hint as it does with it (self-distillation; SDPO, arXiv 2601.20802).
Without a `teacher_prompt` that is refused. The folder of `model` is a teacher that stays as it was.

Not distilled are trajectories whose task has no such field (or for which the function returns None), and those that do
not fit into the model's context after the longer prompt. These end the run with an error that names the trajectory:
first calls without messages (text completions, imported interactions), and prompts that cannot be rendered again from
their messages, for example with template options other than thinking.

### Teachers that are servers

`trainer.teacher` may be the URL of an SGLang server, or `upstream:NAME` of `proxy.upstreams` (its `base_url` and
`api_key_env`; the trainer needs the variable too). When the trainer reads a batch, it has the server score the sampled
token ids (`/generate` with `input_ids` and `logprob_start_len`; nothing is sampled). `trainer.teacher_server` bounds
how many at once, and how often one is asked again. The numbers are stored before the step learns from them, so that a
step that is repeated reads the same ones, whatever the server would answer now.

A server scores sampled tokens only (`distill: sampled`), and at temperature 1: SGLang divides the logprobs of given
tokens by no temperature, so trajectories that were sampled at another one are refused. A server whose model is a folder
on the trainer's machine is compared token by token before the run; otherwise the ids that it echoes, and the texts of
the tokens of its first answer, must be the student's."""

TAIL = """## Functions of your own

`trainer.algorithm.loss: module:function` computes the policy's loss in place of all parts of the loss:

```python
from agentrl.trainer.algorithms.aggregation import Totals
from agentrl.trainer.algorithms.losses import LossTokens


def reinforce(tokens: LossTokens, totals: Totals, algorithm):
    loss = -(tokens.advantages_S * tokens.logprobs_S).sum() / totals.tokens
    return loss, {"surprise": -tokens.logprobs_S.detach().sum()}
```

It gets the loss tokens of one microbatch; a step has many of them, on all ranks, and their gradients are added. It
returns one of two:

- the losses of the tokens, a tensor of their length: `aggregation` reduces them as it does the built-in loss.
- a scalar, this microbatch's share of the loss of the whole minibatch: a sum divided by `totals.tokens` or
  `totals.sequences`, which count the loss tokens and trajectories of the minibatch over all microbatches and ranks. A
  mean over the tokens at hand would weigh tokens by how the batch happens to be cut.

It may return metrics too, as sums over the tokens at hand; the step's metric `loss/NAME` is their total divided by
all loss tokens. `tokens.reference_S` is there with a `kl_coef` above 0; KL, entropy and, with `distill: full`, the
teacher's divergence (`tokens.divergence_S`) are the function's own to add.
Groups without any advantage take no part in the gradient unless `kl_coef` (with `kl: loss`), `entropy_coef`,
`distill_coef`, `m2_threshold`, `clip_cov` or `kl_cov` is set, or there is a critic;
they count in `totals`. `agentrl.trainer.algorithms.losses.token_losses` computes the built-in losses of tokens.

`trainer.algorithm.advantage: module:function` gets the trajectories of the whole batch, with their token ids, turns
and returns, and the algorithm. It returns for each trajectory its advantages: one for each turn, or one for each
token:

```python
def above_half(trajectories, algorithm):
    return [trajectory.turn_returns - 0.5 for trajectory in trajectories]
```

It is called once for a step, on rank 0. `dynamic_sampling` still drops groups with equal returns before it;
`estimator: gae` and `kl: reward` are refused.

Both are loaded and checked before a run starts. The event `code` records the SHA-256 of the source of every function,
agent and reward of a run: of the whole package that its module lies in, else of the module's file. A run that is
resumed with another source says so, goes on with it, and records it.

## Adding an algorithm

A new combination of parts is one entry in `agentrl/configs/presets.py`. Add its formula to
`tests/trainer/algorithms/test_presets.py`, which compares loss and gradient with it.
A new part is a function beside parts of its kind in `trainer/algorithms/`, and a value in
`agentrl/configs/algorithm.py`.

This page is generated from the presets by `scripts/algorithm_reference.py`."""

COLUMNS = ("credit", "baseline", "normalization", "ratio", "clip", "proximal", "correction", "aggregation")


def main() -> None:
    """Print the page."""
    print("\n\n".join([HEAD, formulas(), choice(), parts(), TAIL]))


def formulas() -> str:
    """One row per preset: its formula and its paper."""
    rows = []
    for name, preset in PRESETS.items():
        differs = f"; {preset.differs}" if preset.differs else ""
        formula = preset.formula.replace("|", "\\|")  # a bar ends a cell
        rows.append(f"| `{name}` | {preset.title} | {formula} | {preset.paper}{differs} |")
    head = ["## Presets", "", "| preset | | formula | from |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


def choice() -> str:
    """One row per preset: when to use it, and how it fails."""
    rows = [f"| `{name}` | {preset.suits} | {preset.fails} |" for name, preset in PRESETS.items()]
    head = ["When to use them:", "", "| preset | it suits | how it fails, or what it costs |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, "", CURVES])


CURVES = """Every preset on the same small task, with the same learning rate: a model of 64 tokens with random weights,
answers of three tokens, a reward of 0 or 1 (`benchmarks/estimators.py`). The data is on policy and a step has one
minibatch, so all ratios are 1, and presets that differ only in what they do with ratios have the same curve. The
curves show that each of them learns, not which is best: that depends on the task, the model and the age of the data.

![The mean reward of each preset by step](assets/estimators.png)"""


def parts() -> str:
    """One row per preset: its parts, and its settings that differ from GRPO's."""
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

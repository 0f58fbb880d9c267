"""The arguments of a reward function, chosen by the names of its parameters.

    score(completion, answer)                          names of ours, and of the task's fields
    score(prompt, completions, prompt_ids, completion_ids, **data)             AReaL's names
    compute_score(data_source, solution_str, ground_truth, extra_info)         verl's names

A batched function gets a list for every name, one item per answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.rewards.verifier_names import VERIFIERS
from agentrl.user_code import load_object

if TYPE_CHECKING:  # a process of the pool starts in a fraction of a second without the imports of the domain
    from agentrl.domain.schemas import Json

IDS = frozenset({"prompt_ids", "completion_ids"})
"""Names whose values the proxy sends on request only."""
PASSED_ON = ("finish_reason", "turn", "is_eval", "base_url", "api_key", *sorted(IDS))
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


class Unusable(UserError):
    """The function cannot be called with this task or these arguments. Another attempt would not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A loaded function and how it is called."""

    call: Callable[..., Any]
    parameters: Mapping[str, bool]  # name → whether it is required
    takes_all: bool  # has **kwargs
    args: Json
    batched: bool
    is_async: bool

    @property
    def wants_ids(self) -> bool:
        """Whether the function has a parameter for token ids."""
        return bool(IDS & self.parameters.keys())

    def arguments(self, answers: Sequence[Json]) -> Json:
        """The keyword arguments for one answer, or for all answers of a batch. Raises Unusable."""
        found = [self._of(answer) for answer in answers]
        if not self.batched:
            return found[0] | self.args
        names = {name for one in found for name in one}
        return {name: [one.get(name) for one in found] for name in names} | self.args

    def _of(self, answer: Json) -> Json:
        task = answer["task"]
        values = task | values_of(answer)
        missing = [name for name, required in self.parameters.items() if required and name not in values | self.args]
        if missing:
            also = ", answer or reward_model.ground_truth" if missing[0] == "ground_truth" else ""
            raise Unusable(
                f"parameter {missing[0]!r}: the task has no such field{also}{did_you_mean(missing[0], task)}"
            )
        return {name: values[name] for name in values if name in self.parameters or (self.takes_all and name in task)}


def load_function(spec: str, args: Json, batched: bool | None, field: str) -> RewardFunction:
    """Load `module:function` or a verifier by name. Raises UserError with `field`."""
    function = load_object(spec if ":" in spec else _verifier(spec, field), field)
    if not callable(function):
        raise UserError(f"{field}: {spec!r} is not a function")
    if inspect.isclass(function):
        try:
            function, args = function(**args), {}
        except TypeError as error:
            raise UserError(f"{field}: {spec!r} does not take the arguments in `args`: {error}") from error
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise UserError(f"{field}: {spec!r} has no readable signature: {error}") from error
    parameters = {
        name: parameter.default is parameter.empty
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (*BY_POSITION, parameter.VAR_KEYWORD)
    }
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in signature.parameters.values()):
        raise UserError(f"{field}: {spec!r} has positional-only parameters; arguments are passed by name")
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    unknown = [] if takes_all else [name for name in args if name not in parameters]
    if unknown:
        raise UserError(f"{field}: {spec!r} takes no argument {unknown[0]!r}{did_you_mean(unknown[0], parameters)}")
    return RewardFunction(
        call=function,
        parameters=parameters,
        takes_all=takes_all,
        args=args,
        batched="prompts" in parameters if batched is None else batched,
        is_async=any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))),  # noqa: B004
    )


def _verifier(name: str, field: str) -> str:
    if name not in VERIFIERS:
        raise UserError(f"{field}: {name!r} is neither module:function nor a verifier{did_you_mean(name, VERIFIERS)}")
    return VERIFIERS[name]


def values_of(answer: Json) -> Json:
    """The values of our names, AReaL's and verl's for one answer. `completions` and `solution_str` are the whole text
    that the model wrote, with its thinking; `completion` is the text of the answer alone.
    """
    task, text, reasoning = answer["task"], answer["completion"], answer.get("reasoning")
    whole = f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text
    asked = [message for message in answer["messages"] if message.get("role") == "user"]
    prompt = _text(asked[-1]) if asked else ""
    judged = task.get("reward_model")
    truths = (
        judged.get("ground_truth") if isinstance(judged, dict) else None,
        task.get("ground_truth"),
        task.get("answer"),
    )
    truth = next((one for one in truths if one is not None), None)
    given: Json = {name: answer[name] for name in PASSED_ON if answer.get(name) is not None}
    given |= {} if truth is None else {"ground_truth": truth}
    return given | {
        "task": task,
        "data": task,
        "messages": answer["messages"],
        "prompt": prompt,
        "prompts": prompt,
        "completion": text,
        "completions": whole,
        "solution_str": whole,
        "reasoning": reasoning,
        "data_source": task.get("data_source", ""),
        "extra_info": task.get("extra_info") or {},
    }


def _text(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""

"""Tasks of reasoning-gym's generators, as a source of a config.

tasks:
  path: agentrl.environments.reasoning_tasks:tasks
  args: {datasets: {gcd: {config: {max_value: 20}}, coin_flip: {weight: 2}}, size: 4096, examples: 2}
reward: agentrl.environments.reasoning_score:ReasoningScore
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from agentrl.configs.section import Section
from agentrl.domain.schemas import Json
from agentrl.environments.exact_json import encoded
from agentrl.environments.optional_import import library
from agentrl.errors import UserError, did_you_mean

ALL = "all"
COMPOSITE = "composite"
CHUNK = 500
"""Items that are generated with one seed."""
POOL = 16
"""Items of a generator from which the examples of all its tasks are chosen."""
MOST_LEFT_OUT = 5000
"""Items in a row that do not belong to `split`, or have no answer, after which a generator is refused."""
Split = Literal["train", "heldout"]


class Generator(Section):
    """One generator of a source."""

    name: str | None = None
    """The library's name; null: the key under which the generator is given."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the tasks."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The library's settings of this generator; its defaults apply to those that are not named."""


def tasks(
    datasets: str | Sequence[str] | Mapping[str, Any] = ALL,
    *,
    size: int = 4096,
    seed: int = 0,
    split: Split | None = None,
    examples: int = 0,
    examples_as: Literal["turns", "text"] = "turns",
    instruction: str | None = None,
    tag: str | None = None,
) -> Iterator[Json]:
    """`size` tasks. `datasets` is a name, a list of names, `all`, or a mapping of names to `Generator`s.

    With `split` a fifth of all questions, chosen by their text, are `heldout`; the others are `train`. Each task shows
    `examples` other questions with their answers, as turns of the conversation or in the text of the question.
    `instruction` is appended to each question. With `tag` the answer is expected between `<tag>` and `</tag>`.
    """
    if split not in (None, "train", "heldout"):
        raise UserError(f"tasks.args.split: must be train or heldout, got {split!r}")
    if examples_as not in ("turns", "text") or not 0 <= examples < POOL:
        raise UserError(f"tasks.args: examples_as must be turns or text, and examples from 0 to {POOL - 1}")
    if tag is not None and instruction is None:
        instruction = f"Give the final answer between <{tag}> and </{tag}>."
    drawn = {label: Drawn(label, one, seed, split) for label, one in generators_of(datasets).items()}
    pools = {label: one.pool(examples) for label, one in drawn.items()} if examples else {}
    chosen = random.Random(f"{seed}:{split}")
    labels, weights = list(drawn), [one.generator.weight for one in drawn.values()]
    for _ in range(size):
        label = chosen.choices(labels, weights)[0]
        task = next(drawn[label])
        others = [one for one in pools.get(label, ()) if one["question"] != task["entry"]["question"]]
        shown = chosen.sample(others, min(examples, len(others)))
        yield {
            "messages": conversation(task["entry"]["question"], shown, examples_as, instruction, tag),
            "data_source": label,
            **({} if task["entry"]["answer"] is None else {"answer": task["entry"]["answer"]}),
            "reasoning_gym": task | {"entry": encoded(task["entry"]), "tag": tag},
        }


class Drawn:
    """An endless sequence of a generator's items, in chunks with seeds of their own."""

    def __init__(self, label: str, generator: Generator, seed: int, split: Split | None) -> None:
        self.generator, self._label, self._seed, self._split = generator, label, seed, split
        self._name = generator.name or label
        self._items = self._of_split(split, f"{seed}:{split}")

    def __next__(self) -> Json:
        return next(self._items)

    def pool(self, examples: int) -> list[Json]:
        """Items with an answer that are not held out, for examples. Raises UserError if there are too few."""
        found: dict[str, Json] = {}
        items = self._of_split("train" if self._split else None, f"{self._seed}:examples")
        for _ in range(POOL * 20):
            entry = next(items)["entry"]
            if entry["answer"] is None:
                break
            found[entry["question"]] = entry
            if len(found) == POOL:
                return list(found.values())
        if len(found) <= examples:
            why = "has no reference answers" if not found else f"has only {len(found)} different questions"
            raise UserError(f"tasks.args.examples: {self._label} {why}, so it cannot show {examples} examples")
        return list(found.values())

    def _of_split(self, split: Split | None, seed: str) -> Iterator[Json]:
        chunk = left_out = 0
        while True:
            number = int.from_bytes(hashlib.blake2b(f"{seed}:{self._label}:{chunk}".encode()).digest()[:4], "big") >> 1
            dataset = make(self._name, self.generator.config | {"seed": number, "size": CHUNK}, self._label)
            for index in range(CHUNK):
                entry = dataset[index]
                if split is None or is_held_out(entry["question"]) == (split == "heldout"):
                    left_out = 0
                    about = {"name": self._name, "config": self.generator.config, "seed": number, "index": index}
                    yield about | {"entry": entry}
                elif (left_out := left_out + 1) > MOST_LEFT_OUT:
                    raise UserError(f"tasks.args.split: {self._label} has too few different questions for `{split}`")
            chunk += 1


def make(name: str, config: Json, label: str) -> Any:
    """The library's dataset. Raises UserError for settings that it refuses."""
    gym = library("reasoning_gym")
    if name == COMPOSITE:
        from reasoning_gym.composite import DatasetSpec

        specs = [{"weight": 1.0, "config": {}} | one for one in config.get("datasets", ())]
        config = config | {"datasets": [DatasetSpec(**one) for one in specs]}
    try:
        return gym.create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError, KeyError) as error:  # what the generators' checks raise
        raise UserError(f"tasks.args.datasets.{label}: reasoning-gym refuses its settings: {error}") from error


def generators_of(datasets: Any) -> dict[str, Generator]:
    """The generators by label. Raises UserError for names that the library does not have."""
    known = sorted(names())
    if isinstance(datasets, str):
        datasets = [name for name in known if name != COMPOSITE] if datasets == ALL else [datasets]
    if not isinstance(datasets, Mapping):
        datasets = dict.fromkeys(datasets)
    if not datasets:
        raise UserError("tasks.args.datasets: names no generator")
    found = {}
    for label, settings in datasets.items():
        try:
            found[str(label)] = one = Generator.model_validate(settings or {})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (label, *first["loc"])))
            hint = did_you_mean(str(first["loc"][-1]), Generator.model_fields) if first["loc"] else ""
            raise UserError(f"tasks.args.datasets.{where}: {first['msg']}{hint}") from None
        if (name := one.name or str(label)) not in known:
            raise UserError(f"tasks.args.datasets: reasoning-gym has no {name!r}{did_you_mean(name, known)}")
    return found


def names() -> list[str]:
    """The generators that the library has."""
    return list(library("reasoning_gym").factory.DATASETS)


def is_held_out(question: str) -> bool:
    """Whether a question is held out: a fifth of all questions is."""
    return hashlib.blake2b(question.encode()).digest()[0] % 5 == 0


def conversation(
    question: str, shown: Sequence[Json], shown_as: str, instruction: str | None, tag: str | None
) -> list[Json]:
    """The messages of a task, with examples."""

    def asked(text: str) -> str:
        return text if instruction is None else f"{text}\n\n{instruction}"

    def answered(text: str) -> str:
        return text if tag is None else f"<{tag}>{text}</{tag}>"

    if shown_as == "text" and shown:
        parts = [f"Question: {one['question']}\nAnswer: {answered(str(one['answer']))}" for one in shown]
        parts.append(f"Question: {question}\nAnswer:")
        return [{"role": "user", "content": "\n\n".join([instruction, *parts] if instruction else parts)}]
    messages = []
    for one in shown:
        messages.append({"role": "user", "content": asked(one["question"])})
        messages.append({"role": "assistant", "content": answered(str(one["answer"]))})
    return [*messages, {"role": "user", "content": asked(question)}]

"""What teachers read in place of the first prompt, of a run with messages, and a policy that teaches itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_setup import Setup
from plain import load_plain

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import FACTS
from agentrl.errors import UserError
from agentrl.rendering import Renderer
from agentrl.store.training import steps, token_facts
from agentrl.trainer.distributed import World
from agentrl.trainer.teachers.lessons import first_sampled
from agentrl.trainer.teachers.teacher_prompts import TeacherPrompts, rendered_as, with_field, with_text, write_of

from .chats import SYSTEM, Chats, asks, model_folder

TASKS = [{"word": "abcd", "hint": "It is dcba."}, {"word": "efgh"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("chats") / "model")


@pytest.fixture
def chats(tmp_path: Path, model: Path, world: World) -> Iterator[Callable[..., Chats]]:
    made: list[Chats] = []

    def make(tasks: Any = TASKS, **changes: Any) -> Chats:
        made.append(Chats(tmp_path, model, world, tasks, **changes))
        return made[-1]

    yield make
    for one in made:
        one.database.close()


def leased(setup: Setup) -> Any:
    """The trajectories of a step that is leased now."""
    from agentrl.store.training import trainer_epochs

    def lease(conn: Any) -> Any:
        epoch = trainer_epochs.begin_epoch(conn, setup.run_id)
        return steps.lease(conn, setup.run_id, epoch, step=1, n_groups=2, max_staleness=5, discount=1.0)

    return setup.database.query(steps.batch, setup.database.transact(lease)).trajectories


def test_a_field_of_the_task_follows_the_last_user_message(chats: Callable[..., Chats]) -> None:
    setup = chats()
    batch = leased(setup)
    found = TeacherPrompts(with_field("hint"), setup.renderer, setup.database)(batch)
    told = setup.renderer.render([SYSTEM, {"role": "user", "content": "abcd\n\nIt is dcba."}], None)
    plain = [setup.renderer.render(asks(task["word"]), None) for task in TASKS]
    count = 0
    for one, read in zip(batch, found, strict=True):
        first = first_sampled(one)
        if one.input_ids[:first].tolist() == plain[1]:
            assert read is None  # this task has no hint
            continue
        assert one.input_ids[:first].tolist() == plain[0]
        assert read is not None
        assert read.input_ids.tolist() == [*told, *one.input_ids[first:].tolist()]
        assert read.turn_ids[read.turn_ids >= 0].tolist() == one.turn_ids[one.turn_ids >= 0].tolist()
        count += 1
    assert count == 2


def test_a_function_gets_the_task_and_the_messages(
    chats: Callable[..., Chats], monkeypatch: Any, tmp_path: Path
) -> None:
    (tmp_path / "hints_of_a_test.py").write_text(
        "def hints(task, messages):\n"
        "    assert [m['role'] for m in messages] == ['system', 'user'] and messages[1]['content'] == task['word']\n"
        "    return [*messages, {'role': 'user', 'content': task['word'][::-1]}] if 'hint' in task else None\n"
        "def wrong(task, messages):\n"
        "    return 'reverse it'\n"
        "def other(task):\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    setup = chats()
    batch = leased(setup)

    def configured(prompt: str) -> TrainerConfig:
        return TrainerConfig(teacher="tiny", teacher_prompt=prompt, algorithm={"distill_coef": 1.0})

    write = write_of(configured("hints_of_a_test:hints"))
    assert write is not None
    found = [one for one in TeacherPrompts(write, setup.renderer, setup.database)(batch) if one is not None]
    told = setup.renderer.render([*asks("abcd"), {"role": "user", "content": "dcba"}], None)
    assert [one.input_ids[: len(told)].tolist() for one in found] == [told, told]
    write = write_of(configured("hints_of_a_test:wrong"))
    assert write is not None
    with pytest.raises(UserError, match=r"trainer\.teacher_prompt: it must return messages, or None, not 'reverse it'"):
        TeacherPrompts(write, setup.renderer, setup.database)(batch)
    with pytest.raises(UserError, match=r"trainer\.teacher_prompt: other.* is called with \(task, messages\)"):
        write_of(configured("hints_of_a_test:other"))
    assert write_of(TrainerConfig()) is None


def test_the_beginning_of_a_forced_call_stays_at_the_end(chats: Callable[..., Chats]) -> None:
    setup = chats(opening=(50, 51, 52))
    found = TeacherPrompts(with_field("hint"), setup.renderer, setup.database)(leased(setup))
    told = setup.renderer.render([SYSTEM, {"role": "user", "content": "abcd\n\nIt is dcba."}], None)
    read = next(one for one in found if one is not None)
    assert read.input_ids[: first_sampled(read)].tolist() == [*told, 50, 51, 52]


def test_what_is_not_supported_is_refused_by_name(chats: Callable[..., Chats]) -> None:
    setup = chats(completion=True)
    with pytest.raises(UserError, match=r"first call \w+ of trajectory \w+ has no messages"):
        TeacherPrompts(with_field("hint"), setup.renderer, setup.database)(leased(setup))


def test_a_prompt_with_unknown_options_is_refused_by_name(chats: Callable[..., Chats]) -> None:
    setup = chats(options=True)
    with pytest.raises(UserError, match=r"prompt of call \w+ cannot be rendered again from its messages"):
        TeacherPrompts(with_field("hint"), setup.renderer, setup.database)(leased(setup))


@pytest.mark.parametrize("hint", [{"a": 1}, 3])
def test_a_field_that_holds_no_text_is_refused_by_name(chats: Callable[..., Chats], hint: Any) -> None:
    setup = chats([{"word": "abcd", "hint": hint}, {"word": "efgh", "hint": ""}])
    with pytest.raises(UserError, match=r"the field 'hint' of a task holds (dict|int), not a text"):
        TeacherPrompts(with_field("hint"), setup.renderer, setup.database)(leased(setup))


def test_a_prompt_without_room_in_the_context_teaches_nothing(chats: Callable[..., Chats], model: Path) -> None:
    setup = chats([{"word": "abcd", "hint": "x" * 600}, {"word": "efgh", "hint": "y"}])
    found = TeacherPrompts(with_field("hint"), setup.renderer, setup.database)(leased(setup))
    assert setup.renderer.max_context == 512
    assert sorted(one is None for one in found) == [False, False, True, True]


def test_a_text_is_added_to_the_last_user_message() -> None:
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert with_text([user, assistant], "t") == [{"role": "user", "content": "a\n\nt"}, assistant]
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert with_text([user, parts], "t")[1]["content"] == [*parts["content"], {"type": "text", "text": "t"}]
    assert with_text([SYSTEM], "t") == [SYSTEM, {"role": "user", "content": "t"}]


class Thinks:
    """A renderer with an option for thinking."""

    thinking_option = "enable_thinking"

    def __init__(self, thinks: bool | None = None) -> None:
        self.thinks = thinks

    def with_options(self, options: Any) -> Thinks:
        return Thinks(options["enable_thinking"])

    def render(self, messages: Any, tools: Any) -> list[int]:
        return [1, 2, {None: 3, True: 4, False: 5}[self.thinks]]


@pytest.mark.parametrize(("last", "thinks"), [(3, None), (4, True), (5, False)])
def test_the_option_for_thinking_is_found_by_the_recorded_prompt(last: int, thinks: bool | None) -> None:
    from agentrl.store.training.paths.first_prompts import FirstPrompt

    renderer: Renderer = Thinks()  # type: ignore[assignment]
    recorded = FirstPrompt(call_id="c", task=None, messages=[SYSTEM], tools=None)
    chosen, opening = rendered_as(renderer, recorded, np.array([1, 2, last, 9], np.int32))
    assert chosen.thinks is thinks  # type: ignore[attr-defined]
    assert opening == [9]


@pytest.mark.parametrize("form", ["sampled", "full"])
def test_a_policy_that_reads_a_hint_teaches_itself(chats: Callable[..., Chats], model: Path, form: Any) -> None:
    setup = chats()
    algorithm = Algorithm(distill_coef=1.0, reward_weight=0.0, distill=form, aggregation="token_mean")
    with setup.proxy:
        assert setup.train(algorithm=algorithm, teacher="policy", teacher_prompt="hint")
    (step,) = setup.database.query(steps.of_run, setup.run_id)
    batch = setup.database.query(steps.batch, step.id)
    facts = setup.database.query(token_facts.of_trajectories, {t.trajectory_id: step.id for t in batch.trajectories})
    found = TeacherPrompts(with_field("hint"), setup.renderer, setup.database)(batch.trajectories)
    lm, taught, total = load_plain(model), 0, 0.0
    for one, read in zip(batch.trajectories, found, strict=True):
        kept = facts[one.trajectory_id].trained[FACTS.index("teacher_logprob")]
        if read is None or form == "full":
            assert np.isnan(kept).all()
        if read is None:
            continue
        both = []
        for t in (one, read):
            where = torch.from_numpy(np.flatnonzero(t.loss_mask))
            with torch.no_grad():
                logits = lm(input_ids=torch.from_numpy(t.input_ids).long()[None]).logits[0, where - 1]
            both.append(torch.log_softmax(logits, -1))
        own, theirs = both
        targets = torch.from_numpy(one.input_ids[one.loss_mask]).long()[:, None]
        if form == "sampled":
            np.testing.assert_allclose(kept, theirs.gather(1, targets)[:, 0].numpy(), rtol=1e-4, atol=1e-5)
            total += float((own - theirs).gather(1, targets).sum())
        else:
            total += float((own.exp() * (own - theirs)).sum())
        taught += len(targets)
    assert step.metrics["tokens_taught"] == taught == step.metrics["tokens_trained"] / 2
    assert step.metrics["kl_teacher"] == pytest.approx(total / taught, rel=1e-3)
    assert step.metrics["grad_norm"] > 1e-4

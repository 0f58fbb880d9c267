"""The tokens of a conversation in a file are those that a proxy records when the same answers are sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl.errors import UserError
from agentrl.models import resolve_model
from agentrl.rendering import Renderer, load_renderer
from agentrl.trainer.tuning.encoding import encode

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "abcd"},
    {"role": "assistant", "content": "dcba"},
    {"role": "user", "content": "xyz"},
    {"role": "assistant", "content": "zyx"},
]
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that shows only the last turn's reasoning."""
FORCING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template whose generation prompt has what no finished turn has."""


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return load_renderer(resolve_model("tiny"))


def with_template(folder: Path, template: str) -> Renderer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(template)
    return load_renderer(folder, "template")


def recorded(renderer: Renderer, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """What a proxy records when an engine samples these answers, each ended by its stop token."""
    ids: list[int] = []
    mask: list[bool] = []
    seen: list[dict[str, str]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if ids:
            delta = renderer.bridge(ids, messages[len(seen) : i], None, messages_before=seen).delta_ids
            assert delta is not None
        else:
            delta = renderer.render(messages[:i], None)
        output = [*renderer.encode(message["content"]), renderer.stop_token_ids[0]]
        parser = renderer.parser(None, ids + delta)
        parser.push(output)
        assert parser.finish().content == message["content"]
        ids, mask, seen = (
            [*ids, *delta, *output],
            [*mask, *[False] * len(delta), *[True] * len(output)],
            messages[: i + 1],
        )
    return ids, mask


def test_two_turns_are_one_sequence_as_the_proxy_records_it(renderer: Renderer) -> None:
    (sample,) = encode(renderer, TALK)
    ids, mask = recorded(renderer, TALK)
    assert sample.tokens.input_ids.tolist() == ids
    assert sample.tokens.loss_mask.tolist() == mask
    assert sample.advantages.tolist() == [float(m) for m in mask]
    trained = sample.tokens.input_ids[sample.tokens.loss_mask]
    assert renderer.decode(trained.tolist()) == "dcba<|im_end|>zyx<|im_end|>"


def test_only_the_completion_is_trained(renderer: Renderer) -> None:
    (sample,) = encode(renderer, TALK, first=4)
    assert renderer.decode(sample.tokens.input_ids[sample.tokens.loss_mask].tolist()) == "zyx<|im_end|>"
    (whole,) = encode(renderer, TALK)
    assert sample.tokens.input_ids.tolist() == whole.tokens.input_ids.tolist()


def test_messages_after_the_last_answer_are_left_out(renderer: Renderer) -> None:
    (sample,) = encode(renderer, [*TALK, {"role": "user", "content": "and?"}])
    assert sample.tokens.input_ids.tolist() == recorded(renderer, TALK)[0]


def test_a_format_that_drops_reasoning_starts_a_second_sequence(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, FORGETFUL)
    thoughtful = [m | {"reasoning_content": f"hm {m['content']}"} if m["role"] == "assistant" else m for m in TALK]
    samples = encode(renderer, thoughtful)
    trained = [renderer.decode(s.tokens.input_ids[s.tokens.loss_mask].tolist()) for s in samples]
    assert trained == ["<think>hm dcba</think>dcba<|im_end|>", "<think>hm zyx</think>zyx<|im_end|>"]
    second = samples[1].tokens
    assert second.input_ids[: int(second.loss_mask.argmax())].tolist() == renderer.render(thoughtful[:4], None)
    assert {s.tokens.group_id for s in samples} == {"0"}


def test_a_template_that_changes_the_answers_beginning_is_refused(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, FORCING)
    with pytest.raises(UserError, match=r"messages\[2\]: the chat format does not write this turn after its own"):
        encode(renderer, TALK)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages: must be a non-empty list"),
        (
            [{"role": "assistant", "content": "x"}],
            r"messages\[0\]: an assistant message must answer an earlier message",
        ),
        (TALK[:2], "there is no assistant message to learn"),
        ([*TALK[:2], {"role": "asistant", "content": "x"}], r"messages\[2\].role: .*did you mean 'assistant'"),
        ([*TALK[:2], {"role": "assistant", "content": 7}], r"messages\[2\].content: must be a string"),
    ],
)
def test_bad_messages_are_refused_with_their_index(
    renderer: Renderer, messages: list[dict[str, object]], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        encode(renderer, messages)

"""Hard replies for every format: what a model may write, and the only honest reading of it.

A case makes the ids of one reply and says what must be read. `None` for ids: the format has no place for the case.
`python -m tests.agentrl.rendering.adversarial` prints the table of docs/rendering.md.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.domain.schemas import ForkReason
from agentrl.rendering import ParsedOutput
from agentrl.rendering.parsing.output_formats import Format

from .outputs import check_splits, delivered, follow_up, parse
from .subjects import QUESTION, SUBJECTS, TOOLS, Call, Subject, load_subject

MARK = "Qmark"  # stands for what a case splices into an argument
SPLITS = 2


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be read. None does not matter."""

    calls: Sequence[Call] = ()
    content: str | None = None  # white space aside
    holds: tuple[str, ...] = field(default=())  # what content, or reasoning, must hold


Made = tuple[list[int], Expected] | None
Case = Callable[[Subject], Made]
CASES: dict[str, list[tuple[str, Case]]] = {}
"""By group, in the order of the table."""


def case(group: str) -> Callable[[Case], Case]:
    """Register a case."""

    def register(made: Case) -> Case:
        CASES.setdefault(group, []).append((made.__name__.removeprefix("_").replace("_", " "), made))
        return made

    return register


def _value(group: str, name: str, value: str) -> None:
    def made(subject: Subject) -> Made:
        call = ("calc", {"expression": value})
        return subject.write(call), Expected([call], "")

    CASES.setdefault(group, []).append((name, made))


for _name, _argument in {
    "spaces around": "  a  ",
    "line breaks around": "\n\na\n\n",
    "one line break": "\n",
    "tabs and returns": "\ta\r\n",
    "only spaces": "   ",
    "empty": "",
    "indented code": "    def f():\n        return 1\n",
}.items():
    _value("white space", _name, _argument)
for _name, _argument in {
    "double": 'say "hi"',
    "single": "it's 'so'",
    "escaped": 'a \\" b \\\\ c \\n d',
    "JSON in a string": '{"name": "calc", "arguments": {"expression": "1"}}',
    "shell": "echo \"$(cat 'x y')\" | sed 's/\\\\/|/g'",
    "brackets": "}}]]))",
}.items():
    _value("quotes", _name, _argument)
for _name, _argument in {
    "letters": "é ü ß 日本 العربية",
    "emoji": "🙂 👩‍👩‍👧 🇩🇪",
    "combining": "e\u0301 한",
    "invisible": "a\u200bb\u2028c\ufeff",
    "replacement": "\ufffd",
}.items():
    _value("Unicode", _name, _argument)


def _calc(text: str) -> Call:
    return "calc", {"expression": text}


@case("markers")
def _spelled_in_an_argument(subject: Subject) -> Made:
    """Every marker token of the vocabulary, spelled by ordinary tokens."""
    spelled = " ".join(subject.markers)
    ids = _spliced(subject, subject.write(_calc(f"a {MARK} b")), _as_text(subject, spelled))
    return ids, Expected([_calc(f"a {spelled} b")], "")


@case("markers")
def _end_of_call_as_a_token_in_an_argument(subject: Subject) -> Made:
    return _token_in_argument(subject, subject.closer)


@case("markers")
def _beginning_of_call_as_a_token_in_an_argument(subject: Subject) -> Made:
    return _token_in_argument(subject, subject.opener)


@case("markers")
def _end_of_reasoning_as_a_token_in_an_argument(subject: Subject) -> Made:
    if not subject.renderer.reasons or not isinstance(subject.reads, Format):
        return None
    return _token_in_argument(subject, subject.reads.think[1])


@case("markers")
def _spelled_in_content(subject: Subject) -> Made:
    """Markers that are tokens, spelled in content by other tokens."""
    spelled = " ".join(subject.markers)
    if not subject.text_beside_calls or not subject.markers:
        return None
    ids = _spliced(subject, subject.write(text=f"a {MARK} b"), _as_text(subject, spelled))
    return ids, Expected((), f"a {spelled} b")


@case("several")
def _two(subject: Subject) -> Made:
    calls = [_calc("1"), ("look_up", {"word": "w", "n": 2})]
    return None if subject.one_call else (subject.write(*calls), Expected(calls, ""))


@case("several")
def _five_alike(subject: Subject) -> Made:
    calls = [_calc("1")] * 5
    return None if subject.one_call else (subject.write(*calls), Expected(calls, ""))


@case("several")
def _a_broken_one_before_a_good_one(subject: Subject) -> Made:
    if not subject.opener or subject.one_call or not _closed(subject):
        return None
    text, stop = _text(subject, subject.write(_calc("1"), _calc("2")))
    if text.count(subject.closer) < 2:  # both stand in one block
        return None
    return subject.renderer._encode(text.replace(subject.closer, "", 1)) + stop, Expected([_calc("2")], None, ("1",))


@case("text")
def _before(subject: Subject) -> Made:
    if not subject.text_beside_calls:
        return None
    return subject.write(_calc("1"), text="Before."), Expected([_calc("1")], "Before.")


@case("text")
def _after(subject: Subject) -> Made:
    if subject.reads.name in ("harmony", "inkling") or subject.name == "llama-4":
        return None
    text, stop = _text(subject, subject.write(_calc("1")))
    return subject.renderer._encode(f"{text}\nAfter.") + stop, Expected([_calc("1")], "After.")


@case("text")
def _between(subject: Subject) -> Made:
    if not subject.opener or subject.one_call or not _closed(subject):
        return None
    text, stop = _text(subject, subject.write(_calc("1"), _calc("2")))
    at = text.find(subject.opener, text.find(subject.opener) + 1)
    if at < 0:  # both stand in one block
        return None
    ids = subject.renderer._encode(f"{text[:at]}Between.\n{text[at:]}") + stop
    return ids, Expected([_calc("1"), _calc("2")], "Between.")


@case("text")
def _alone(subject: Subject) -> Made:
    return subject.write(text="It is < 3 & {so}, [x] | `y`."), Expected((), "It is < 3 & {so}, [x] | `y`.")


@case("text")
def _that_quotes_a_call_of_another_format(subject: Subject) -> Made:
    quoted = '```json\n{"name": "calc", "parameters": {"expression": "1"}}\n```'
    return subject.write(text=quoted), Expected((), quoted)


@case("truncation")
def _at_every_token(subject: Subject) -> Made:
    """The case itself is whole; `check` cuts it."""
    call = _calc("12345 ")
    return subject.write(call), Expected([call], "")


@case("types")
def _every_type(subject: Subject) -> Made:
    call = ("look_up", {"word": "1", "n": -3, "x": 1.5, "b": True, "l": [1, "a", None], "o": {"é": {"a": False}}})
    return subject.write(call), Expected([call], "")


@case("types")
def _null(subject: Subject) -> Made:
    call = ("look_up", {"word": "null", "z": None, "b": False})
    return subject.write(call), Expected([call], "")


@case("types")
def _words_where_numbers_should_be(subject: Subject) -> Made:
    call = ("look_up", {"n": "three", "b": "yes", "l": "none"})
    return subject.write(call), Expected([call], "")


@case("types")
def _numbers_that_are_strings(subject: Subject) -> Made:
    call = _calc("007")
    return subject.write(call), Expected([call], "")


@case("types")
def _values_that_JSON_has_no_word_for(subject: Subject) -> Made:
    text, stop = _text(subject, subject.write(("look_up", {"n": 77777})))
    calls = [("look_up", {"n": "NaN"})] if subject.untyped else []
    return subject.renderer._encode(text.replace("77777", "NaN")) + stop, Expected(calls, None)


@case("empty")
def _no_arguments(subject: Subject) -> Made:
    return subject.write(("look_up", {})), Expected([("look_up", {})], "")


@case("empty")
def _nothing(subject: Subject) -> Made:
    return [], Expected((), "")


@case("unclosed")
def _without_its_end(subject: Subject) -> Made:
    text, _ = _text(subject, subject.write(_calc("12345")))
    cut = text[: text.rfind(subject.closer)]
    return subject.renderer._encode(cut) + _stop(subject), Expected((), None, ("12345",))


@case("unclosed")
def _without_its_arguments_end(subject: Subject) -> Made:
    text, _ = _text(subject, subject.write(_calc("12345")))
    at = text.rfind("12345") + 3
    rest = text[text.rfind(subject.closer) :]
    return subject.renderer._encode(text[:at] + rest) + _stop(subject), Expected((), None, ("123",))


@case("unclosed")
def _reasoning_with_a_drafted_call(subject: Subject) -> Made:
    """A call within reasoning that goes on behind it is a draft."""
    if not subject.renderer.reasons or not isinstance(subject.reads, Format) or not subject.opener:
        return None
    text, _ = _text(subject, subject.write(_calc("12345")))
    start, end = subject.reads.think
    before, found, call = text.rpartition(end)
    call = call if found else text
    opened = before if found else start
    whole = f"{opened}\nhm{call}\nno.\n{end}\n\nDone."
    return subject.renderer._encode(whole) + _stop(subject), Expected((), "Done.", ("12345",))


@case("unclosed")
def _reasoning_that_a_call_ends(subject: Subject) -> Made:
    """Reasoning without an end, a whole call, and the end of the reply: the model has called."""
    if not subject.renderer.reasons or not isinstance(subject.reads, Format) or not subject.opener:
        return None
    if not subject.reads.ends_reasoning:
        return None
    text, stop = _text(subject, subject.write(_calc("12345")))
    start, end = subject.reads.think
    before, found, call = text.rpartition(end)
    opened = before if found else start
    whole = f"{opened}\nhm\n{(call if found else text).lstrip()}"
    return subject.renderer._encode(whole) + stop, Expected([_calc("12345")], "", ("hm",))


@case("malformed")
def _no_value(subject: Subject) -> Made:
    """`{"n": }`, or a value without its brackets."""
    text, _ = _text(subject, subject.write(("look_up", {"l": [77777]})))
    if subject.untyped:
        return None
    return subject.renderer._encode(text.replace("[77777]", "")) + _stop(subject), Expected((), None, ("look_up",))


@case("malformed")
def _no_name(subject: Subject) -> Made:
    text, _ = _text(subject, subject.write(("look_up", {"n": 77777})))
    return subject.renderer._encode(text.replace("look_up", "")) + _stop(subject), Expected((), None, ("77777",))


@case("malformed")
def _a_name_with_white_space(subject: Subject) -> Made:
    text, _ = _text(subject, subject.write(("look_up", {"n": 77777})))
    return subject.renderer._encode(text.replace("look_up", "look up")) + _stop(subject), Expected((), None, ("77777",))


@case("malformed")
def _a_tool_that_there_is_not(subject: Subject) -> Made:
    """The agent says so to the model. Only formats without markers take it for text."""
    text, stop = _text(subject, subject.write(("look_up", {"n": 77777})))
    known = subject.reads.name.startswith("llama")
    calls = [] if known else [("look_upp", {"n": 77777})]
    ids = subject.renderer._encode(text.replace("look_up", "look_upp")) + (_stop(subject) if known else stop)
    return ids, Expected(calls, None)


@case("malformed")
def _an_argument_twice(subject: Subject) -> Made:
    """Which one was meant is not known; JSON says the last."""
    if not subject.untyped or subject.reads.name == "gemma4":
        return None
    text, _ = _text(subject, subject.write(("look_up", {"n": 77777, "x": 88888})))
    twice = text.replace(">n<", ">x<").replace("=n>", "=x>").replace('"n"', '"x"')
    return subject.renderer._encode(twice) + _stop(subject), Expected((), None, ("77777", "88888"))


def _token_in_argument(subject: Subject, marker: str) -> Made:
    if subject.renderer._tokenizer.token_to_id(marker) is None or marker == '"':
        return None
    ids = _spliced(subject, subject.write(_calc(f"a {MARK} b")), subject.renderer._encode(marker))
    return ids, Expected([_calc(f"a {marker} b")], "")


def _closed(subject: Subject) -> bool:
    return isinstance(subject.reads, Format) and subject.reads.blocks.get(subject.opener) is not None


def _text(subject: Subject, ids: list[int]) -> tuple[str, list[int]]:
    """A reply's text, and its stop token."""
    return subject.renderer.decode(ids[:-1]), ids[-1:]


def _stop(subject: Subject) -> list[int]:
    """What stops a reply without a call."""
    return subject.write(text="x")[-1:]


def _as_text(subject: Subject, text: str) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(subject.renderer._tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    for token in tokenizer.get_added_tokens_decoder().values():
        text = text.replace(token.content, "\0".join(token.content))  # added tokens that are not special
    return [id for part in text.split("\0") for id in tokenizer.encode(part, add_special_tokens=False).ids]


def _spliced(subject: Subject, ids: list[int], inner: list[int]) -> list[int]:
    mark = subject.renderer._encode(MARK)
    at = next(i for i in range(len(ids)) if ids[i : i + len(mark)] == mark)
    return ids[:at] + inner + ids[at + len(mark) :]


def check(subject: Subject, made: tuple[list[int], Expected]) -> str:
    """Why a case fails, "" where it passes."""
    ids, expected = made
    prompt = subject.prompt
    parsed, _ = parse(subject.renderer, TOOLS, prompt, ids)
    found = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
    if not _equal(found, expected.calls):
        return f"calls {found}"
    if expected.content is not None and (parsed.content or "").split() != expected.content.split():
        return f"content {parsed.content!r}"
    said = f"{parsed.content}{parsed.reasoning}"
    if missing := [text for text in expected.holds if text not in said]:
        return f"{missing} is lost"
    one_id = len({call.id for call in parsed.tool_calls}) < len(parsed.tool_calls)
    if one_id and subject.reads.name != "kimi":  # whose ids are the model's own
        return "two calls have one id"
    cuts = random.Random(len(ids))
    for _ in range(SPLITS):
        check_splits(subject.renderer, TOOLS, prompt, ids, [cuts.randrange(len(ids) + 1) for _ in range(4)])
    return _cut_short(subject, ids, expected) or _round_trip(subject, parsed, ids)


def _cut_short(subject: Subject, ids: list[int], expected: Expected) -> str:
    """A reply that is cut off has a call only where the whole one has it."""
    for end in range(1, len(ids), max(1, len(ids) // 25)):
        parsed, _ = parse(subject.renderer, TOOLS, subject.prompt, ids[:end])
        found = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
        if not _equal(found, list(expected.calls)[: len(found)]):
            return f"cut at {end}: calls {found}"
    return ""


def _round_trip(subject: Subject, parsed: ParsedOutput, ids: list[int]) -> str:
    """The client sends back what it got: the next prompt begins with the recorded tokens, or reasoning was dropped."""
    if not subject.ends(ids):
        return ""
    previous = subject.prompt + ids
    before = [*QUESTION, delivered(parsed, with_reasoning=True)]
    bridge = subject.renderer.bridge(previous, follow_up(parsed, "more"), TOOLS, messages_before=before)
    if bridge.delta_ids is None and bridge.reason is not ForkReason.REASONING_DROPPED:
        return f"the next turn forks: {bridge.reason}"
    if bridge.delta_ids is not None and "more" not in subject.renderer.decode(bridge.delta_ids):
        return "the next turn is not rendered"
    return ""


def _equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Equal values of equal types."""
    return json.dumps(list(found), sort_keys=True) == json.dumps(list(expected), sort_keys=True)


KNOWN = {
    ("qwen3.5 (no thinking)", "end of reasoning as a token in an argument"),
    ("qwen3.5 (no thinking)", "reasoning that a call ends"),
}
"""Cases that fail: the reply is read, but its template writes it otherwise, so that the next turn forks. It takes
`</think>` in a text for the end of reasoning, and opens none of its own."""


Result = tuple[str, str, str | None]


def results(subject: Subject) -> Iterator[Result]:
    """Group, name, and why a case fails: "" where it passes, None where the format has no place for it."""
    for group, cases in CASES.items():
        for name, made in cases:
            found = made(subject)
            yield group, name, None if found is None else check(subject, found)


def row(name: str, format: str, found: Sequence[Result]) -> str:
    """A line of the table."""
    by_group: dict[str, list[str | None]] = {}
    for group, _, why in found:
        by_group.setdefault(group, []).append(why)
    return f"| {name} | {format} | {' | '.join(map(_cell, by_group.values()))} |"


def _cell(found: list[str | None]) -> str:
    run = [why for why in found if why is not None]
    return f"{sum(not why for why in run)}/{len(run)}" if run else "–"


def head() -> str:
    """The first lines of the table."""
    columns = ["family or template", "format", *CASES]
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def table() -> str:
    """Cases passed of those that a format has a place for, by group."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(SUBJECTS):
            subject = load_subject(Path(folder) / str(i), name)
            rows.append(row(name, subject.reads.name, list(results(subject))))
    return "\n".join([head(), *rows])


if __name__ == "__main__":
    print(table())

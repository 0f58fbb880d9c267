"""Cases of whole replies: arguments of any text and type, markers, several calls, and text beside them."""

from __future__ import annotations

from agentrl.rendering.parsing.output_formats import Format

from .reply_cases import (
    CASES,
    MARK,
    Expected,
    Made,
    as_text,
    calc,
    case,
    closed,
    spliced,
    split_stop,
    token_in_argument,
)
from .subjects import Subject


def _value(group: str, name: str, value: str) -> None:
    def made(subject: Subject) -> Made:
        call = ("calc", {"expression": value})
        return subject.write(call), Expected([call], "")

    CASES[group].append((name, made))


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


@case("markers")
def _spelled_in_an_argument(subject: Subject) -> Made:
    """Every marker token of the vocabulary, spelled by ordinary tokens."""
    spelled = " ".join(subject.markers)
    ids = spliced(subject, subject.write(calc(f"a {MARK} b")), as_text(subject, spelled))
    return ids, Expected([calc(f"a {spelled} b")], "")


@case("markers")
def _end_of_call_as_a_token_in_an_argument(subject: Subject) -> Made:
    return token_in_argument(subject, subject.closer)


@case("markers")
def _beginning_of_call_as_a_token_in_an_argument(subject: Subject) -> Made:
    return token_in_argument(subject, subject.opener)


@case("markers")
def _end_of_reasoning_as_a_token_in_an_argument(subject: Subject) -> Made:
    if not subject.renderer.reasons or not isinstance(subject.reads, Format):
        return None
    return token_in_argument(subject, subject.reads.think[1])


@case("markers")
def _spelled_in_content(subject: Subject) -> Made:
    """Markers that are tokens, spelled in content by other tokens."""
    spelled = " ".join(subject.markers)
    if not subject.text_beside_calls or not subject.markers:
        return None
    ids = spliced(subject, subject.write(text=f"a {MARK} b"), as_text(subject, spelled))
    return ids, Expected((), f"a {spelled} b")


@case("several")
def _two(subject: Subject) -> Made:
    calls = [calc("1"), ("look_up", {"word": "w", "n": 2})]
    return None if subject.one_call else (subject.write(*calls), Expected(calls, ""))


@case("several")
def _five_alike(subject: Subject) -> Made:
    calls = [calc("1")] * 5
    return None if subject.one_call else (subject.write(*calls), Expected(calls, ""))


@case("several")
def _a_broken_one_before_a_good_one(subject: Subject) -> Made:
    if not subject.opener or subject.one_call or not closed(subject):
        return None
    text, stop = split_stop(subject, subject.write(calc("1"), calc("2")))
    if text.count(subject.closer) < 2:  # both stand in one block
        return None
    return subject.renderer._encode(text.replace(subject.closer, "", 1)) + stop, Expected([calc("2")], None, ("1",))


@case("text")
def _before(subject: Subject) -> Made:
    if not subject.text_beside_calls:
        return None
    return subject.write(calc("1"), text="Before."), Expected([calc("1")], "Before.")


@case("text")
def _after(subject: Subject) -> Made:
    if subject.reads.name in ("harmony", "inkling") or subject.name == "llama-4":
        return None
    text, stop = split_stop(subject, subject.write(calc("1")))
    return subject.renderer._encode(f"{text}\nAfter.") + stop, Expected([calc("1")], "After.")


@case("text")
def _between(subject: Subject) -> Made:
    if not subject.opener or subject.one_call or not closed(subject):
        return None
    text, stop = split_stop(subject, subject.write(calc("1"), calc("2")))
    at = text.find(subject.opener, text.find(subject.opener) + 1)
    if at < 0:  # both stand in one block
        return None
    ids = subject.renderer._encode(f"{text[:at]}Between.\n{text[at:]}") + stop
    return ids, Expected([calc("1"), calc("2")], "Between.")


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
    call = calc("12345 ")
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
    call = calc("007")
    return subject.write(call), Expected([call], "")


@case("types")
def _values_that_JSON_has_no_word_for(subject: Subject) -> Made:
    text, stop = split_stop(subject, subject.write(("look_up", {"n": 77777})))
    calls = [("look_up", {"n": "NaN"})] if subject.untyped else []
    return subject.renderer._encode(text.replace("77777", "NaN")) + stop, Expected(calls, None)


@case("empty")
def _no_arguments(subject: Subject) -> Made:
    return subject.write(("look_up", {})), Expected([("look_up", {})], "")


@case("empty")
def _nothing(subject: Subject) -> Made:
    return [], Expected((), "")

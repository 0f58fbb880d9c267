"""Cases of replies that a model wrote wrongly: not closed, or malformed."""

from __future__ import annotations

from agentrl.rendering.parsing.output_formats import Format

from .reply_cases import Expected, Made, calc, case, plain_stop, split_stop
from .subjects import Subject


@case("unclosed")
def _without_its_end(subject: Subject) -> Made:
    text, _ = split_stop(subject, subject.write(calc("12345")))
    cut = text[: text.rfind(subject.closer)]
    return subject.renderer._encode(cut) + plain_stop(subject), Expected((), None, ("12345",))


@case("unclosed")
def _without_its_arguments_end(subject: Subject) -> Made:
    text, _ = split_stop(subject, subject.write(calc("12345")))
    at = text.rfind("12345") + 3
    rest = text[text.rfind(subject.closer) :]
    return subject.renderer._encode(text[:at] + rest) + plain_stop(subject), Expected((), None, ("123",))


@case("unclosed")
def _reasoning_with_a_drafted_call(subject: Subject) -> Made:
    """A call within reasoning that goes on behind it is a draft."""
    if not subject.renderer.reasons or not isinstance(subject.reads, Format) or not subject.opener:
        return None
    text, _ = split_stop(subject, subject.write(calc("12345")))
    start, end = subject.reads.think
    before, found, call = text.rpartition(end)
    call = call if found else text
    opened = before if found else start
    whole = f"{opened}\nhm{call}\nno.\n{end}\n\nDone."
    return subject.renderer._encode(whole) + plain_stop(subject), Expected((), "Done.", ("12345",))


@case("unclosed")
def _reasoning_that_a_call_ends(subject: Subject) -> Made:
    """Reasoning without an end, a whole call, and the end of the reply: the model has called."""
    if not subject.renderer.reasons or not isinstance(subject.reads, Format) or not subject.opener:
        return None
    if not subject.reads.ends_reasoning:
        return None
    text, stop = split_stop(subject, subject.write(calc("12345")))
    start, end = subject.reads.think
    before, found, call = text.rpartition(end)
    opened = before if found else start
    whole = f"{opened}\nhm\n{(call if found else text).lstrip()}"
    return subject.renderer._encode(whole) + stop, Expected([calc("12345")], "", ("hm",))


@case("malformed")
def _no_value(subject: Subject) -> Made:
    """`{"n": }`, or a value without its brackets."""
    text, _ = split_stop(subject, subject.write(("look_up", {"l": [77777]})))
    if subject.untyped:
        return None
    return subject.renderer._encode(text.replace("[77777]", "")) + plain_stop(subject), Expected((), None, ("look_up",))


@case("malformed")
def _no_name(subject: Subject) -> Made:
    text, _ = split_stop(subject, subject.write(("look_up", {"n": 77777})))
    return subject.renderer._encode(text.replace("look_up", "")) + plain_stop(subject), Expected((), None, ("77777",))


@case("malformed")
def _a_name_with_white_space(subject: Subject) -> Made:
    text, _ = split_stop(subject, subject.write(("look_up", {"n": 77777})))
    return subject.renderer._encode(text.replace("look_up", "look up")) + plain_stop(subject), Expected(
        (), None, ("77777",)
    )


@case("malformed")
def _a_tool_that_there_is_not(subject: Subject) -> Made:
    """The agent says so to the model. Only formats without markers take it for text."""
    text, stop = split_stop(subject, subject.write(("look_up", {"n": 77777})))
    known = subject.reads.name.startswith("llama")
    calls = [] if known else [("look_upp", {"n": 77777})]
    ids = subject.renderer._encode(text.replace("look_up", "look_upp")) + (plain_stop(subject) if known else stop)
    return ids, Expected(calls, None)


@case("malformed")
def _an_argument_twice(subject: Subject) -> Made:
    """Which one was meant is not known; JSON says the last."""
    if not subject.untyped or subject.reads.name == "gemma4":
        return None
    text, _ = split_stop(subject, subject.write(("look_up", {"n": 77777, "x": 88888})))
    twice = text.replace(">n<", ">x<").replace("=n>", "=x>").replace('"n"', '"x"')
    return subject.renderer._encode(twice) + plain_stop(subject), Expected((), None, ("77777", "88888"))

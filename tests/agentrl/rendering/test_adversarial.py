"""Hard replies, in every format: read exactly, the same however they are cut, and extended by the next turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.rendering.parsing.call_readers import CallReader, Items
from agentrl.rendering.parsing.markup import MarkupParser
from agentrl.rendering.parsing.parser_choice import FAMILIES
from agentrl.rendering.parsing.typed_values import Parameters
from agentrl.rendering.templates.families import family_names

from .adversarial import KNOWN, Result, head, results, row
from .subjects import SUBJECTS, TOOLS, load_subject

PAGE = Path(__file__).parents[3] / "docs" / "rendering.md"


@pytest.fixture(scope="module", params=SUBJECTS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, list[Result]]:
    subject = load_subject(tmp_path_factory.mktemp("subjects") / "model", request.param)
    return subject.name, subject.reads.name, list(results(subject))


def test_every_case_is_read_as_it_was_written(found: tuple[str, str, list[Result]]) -> None:
    name, _, cases = found
    failing = {case: why for _, case, why in cases if why}
    assert failing.keys() == {case for subject, case in KNOWN if subject == name}, failing
    assert sum(why == "" for _, _, why in cases) > 30


def test_the_documentation_has_the_table_of_results(found: tuple[str, str, list[Result]]) -> None:
    page = PAGE.read_text()
    assert head() in page
    assert row(*found) in page, row(*found)


def test_every_family_that_can_be_read_is_there() -> None:
    assert set(family_names()) == FAMILIES.keys() <= set(SUBJECTS)


class Counted:
    """A reader that counts the characters that it is asked to read."""

    def __init__(self, inner: CallReader) -> None:
        self.inner, self.characters = inner, 0

    def read(self, body: str, parameters: Parameters) -> Items | None:
        """As the reader does."""
        self.characters += len(body)
        return self.inner.read(body, parameters)

    def goes_on(self, body: str) -> bool:
        """As the reader does."""
        self.characters += len(body)
        return self.inner.goes_on(body)


@pytest.mark.parametrize(
    "unit", ["{open}", "{open}{close}", '{open}"{close}', '{open}{open}"{close}{close}', "{close}"]
)
def test_reading_takes_linear_time(tmp_path: Path, unit: str) -> None:
    """A policy that repeats itself must not stop the proxy: no character is read many times."""
    subject = load_subject(tmp_path / "model", "qwen3")
    text = unit.format(open="<tool_call>", close="</tool_call>") * 500 + "</tool_call>"
    parser = subject.renderer.parser(TOOLS, subject.prompt)
    assert isinstance(parser, MarkupParser)
    counted = Counted(parser._reader)
    parser._reader = counted  # type: ignore[assignment]
    parser.push(subject.renderer._encode(text))
    parsed = parser.finish()
    assert (parsed.content, parsed.tool_calls) == (text, [])
    assert counted.characters < 100 * len(text)

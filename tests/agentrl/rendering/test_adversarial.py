"""Hard replies, in every format: read exactly, the same however they are cut, and extended by the next turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.rendering.families import family_names
from agentrl.rendering.reading import FAMILIES

from .adversarial import KNOWN, Result, head, results, row
from .subjects import SUBJECTS, load_subject

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


def test_the_page_has_the_table(found: tuple[str, str, list[Result]]) -> None:
    page = PAGE.read_text()
    assert head() in page
    assert row(*found) in page, row(*found)


def test_every_family_that_can_be_read_is_there() -> None:
    assert set(family_names()) == FAMILIES.keys() <= set(SUBJECTS)

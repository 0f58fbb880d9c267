"""The example of docs/fakes.md runs, and the page names every field of a reply."""

import dataclasses
import re
from pathlib import Path

from agentrl.testing import Reply

PAGE = (Path(__file__).parents[3] / "docs" / "fakes.md").read_text()


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(example, {})


def test_every_field_of_a_reply_is_on_the_page() -> None:
    assert [field.name for field in dataclasses.fields(Reply) if f"`{field.name}`" not in PAGE] == []

"""docs/doctor.md cannot drift."""

from pathlib import Path

from agentrl.domain.schemas import ForkReason, Role

PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()


def test_every_reason_and_role_is_on_the_page() -> None:
    for value in [*ForkReason, *Role, "branch", "parallel"]:
        assert f"| `{value}` |" in PAGE

"""The parameters of a page's address, bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.errors import bad_parameter

LONGEST = 200
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Runs:
    """The ids of the runs that an address names, each of which the viewer may see.

    `bound_to` is the one run that the viewer is bound to, or None.
    """

    named: Sequence[str]
    bound_to: str | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """The query string of a page. Every reader raises RequestError 400 with the name of a value that it refuses.

    `pairs` holds every parameter in its order, for those that may be repeated.
    """

    given: Mapping[str, str]
    pairs: Sequence[tuple[str, str]] = ()

    def text(self, name: str) -> str | None:
        """A text of at most LONGEST characters; None if it is absent or empty."""
        value = self.given.get(name, "").strip()
        if len(value) > LONGEST:
            raise bad_parameter(name, f"{name}: at most {LONGEST} characters")
        if "\0" in value:
            raise bad_parameter(name, f"{name}: it contains NUL")
        return value or None

    def texts(self, name: str, most: int) -> list[str]:
        """The different texts of a parameter that may be repeated, at most `most`."""
        values = dict.fromkeys(value.strip() for key, value in self.pairs if key == name)
        found = [text for value in values if (text := Query({name: value}).text(name)) is not None]
        if len(found) > most:
            raise bad_parameter(name, f"{name}: at most {most} of them")
        return found

    def choice(self, name: str, *choices: str) -> str | None:
        """One of `choices`; None if it is absent."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise bad_parameter(name, f"{name}: one of {', '.join(choices)}")
        return value

    def integer(self, name: str) -> int | None:
        """An integer from 0; None if it is absent."""
        value = self.text(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit()) or int(value) > MAX_INT32:
            raise bad_parameter(name, f"{name}: a whole number from 0 to {MAX_INT32}")
        return int(value)

    def number(self, name: str) -> float | None:
        """A finite number; None if it is absent."""
        value = self.text(name)
        if value is None:
            return None
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise bad_parameter(name, f"{name}: a number")
        return found

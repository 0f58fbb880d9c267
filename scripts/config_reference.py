"""Write docs/config.md from the configuration classes: `python scripts/config_reference.py > docs/config.md`."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from agentrl.configs.config_files import section_of
from agentrl.configs.run_config import RunConfig

HEAD = """# Configuration

`agentrl train CONFIG.yaml [section.key=value …]` reads a YAML file. Every key below can also be set on the command
line, with a YAML value. An unknown key is an error; the message suggests the nearest valid key.
`runs/NAME/config.yaml` holds the complete configuration of a run, including defaults.

If the run exists, `agentrl train` resumes it. Then only keys that say *how* the run is executed may change: `steps`
(which may only grow), `engine`, `proxy`, concurrency, time-outs, devices and checkpoint intervals. A change of *what*
the run computes is refused.

`trainer.max_staleness` is what AReaL calls `max_head_offpolicyness` and others call `max_off_policy_steps`.

This page is generated from `agentrl/configs/` by `scripts/config_reference.py`."""


def main() -> None:
    """Print the page."""
    print("\n\n".join([HEAD, *sections("", RunConfig)]))


def sections(prefix: str, section: type[BaseModel], listed: set[type] | None = None) -> Iterator[str]:
    """One table per section, parents first. Sections in lists are described once (`listed`)."""
    rows, children, meanings = [], [], descriptions(section)
    listed = set() if listed is None else listed
    for name, field in section.model_fields.items():
        kind = field.annotation
        if held := section_of(kind):
            children.append((f"{prefix}{name}.", held))
        if held is kind:
            continue
        of = get_args(kind)[1] if get_origin(kind) is dict else None
        if isinstance(of, type) and issubclass(of, BaseModel):
            children.append((f"{prefix}{name}.NAME.", of))
        else:
            default = _default(field.get_default(call_default_factory=True))
            rows.append(f"| `{prefix}{name}` | {default} | {_line(meanings[name])}{_choices(kind)} |")
            for one in _in_lists(kind):
                if one not in listed:
                    listed.add(one)
                    children.append((f"{prefix}{name}.", one))
    title = f"## {prefix.rstrip('.')}" if prefix else "## The run"
    yield "\n".join(
        [title, "", _line(section.__doc__), "", "| key | default | meaning |", "| --- | --- | --- |", *rows]
    )
    for child_prefix, kind in children:
        yield from sections(child_prefix, kind, listed)


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Field → the docstring below it, of a section and its base classes. Read here, because pydantic reads them at each
    import of the classes.
    """
    found = {}
    for kind in reversed(section.__mro__[: section.__mro__.index(BaseModel)]):
        (source,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(source, ast.ClassDef)
        for field, below in pairwise(source.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = text
    return found


def _in_lists(kind: object, inside: bool = False) -> list[type[BaseModel]]:
    """The sections that a field's lists hold."""
    inside = inside or get_origin(kind) is list
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind] if inside else []
    return [found for part in get_args(kind) for found in _in_lists(part, inside)]


def _line(text: str | None) -> str:
    return " ".join(str(text).split())


def _choices(kind: object) -> str:
    """A sentence with the values of a Literal, or of the Literal in a union with None; empty for other types."""
    if get_origin(kind) is Literal:
        values = [f"`{value}`" for value in get_args(kind)]
        return f" Only {values[0]}." if len(values) == 1 else f" One of {', '.join(values)}."
    return "".join(_choices(part) for part in get_args(kind) if get_origin(part) is Literal)


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    return f"`{json.dumps(value, default=str)}`"


if __name__ == "__main__":
    main()

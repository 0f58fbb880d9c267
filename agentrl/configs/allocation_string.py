"""AReaL's allocation strings, the short form of the section `resources`.

    sglang:d4t2+fsdp:d8     4 engines on 2 GPUs each, and a trainer of 8 ranks on GPUs of its own
    sglang:d4t2|fsdp:d8     the same parts on the same 8 GPUs

An item is BACKEND:SIZES, or BACKEND[ROLE]:SIZES with the role `rollout` or `actor`. SIZES are a letter and a number
each: `d` copies (engines) or shards (trainer), `t` tensor parallel, `p` pipeline parallel, `e` expert parallel, `c`
context parallel. AReaL's older form with a dot in place of the colon, and a trainer without a backend, are read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentrl.errors import did_you_mean

Sizes = dict[str, int]

ITEM = re.compile(r"(?:(?P<backend>[a-z]+)(?:\[(?P<role>[a-z]+)\])?[:.])?(?P<sizes>[a-z0-9]+)")
SIZE = re.compile(r"([a-z])([1-9][0-9]{0,4})")
MAX_LENGTH = 200

ENGINE_SIZES: Mapping[str, str] = {"d": "count", "t": "tensor", "p": "pipeline", "e": "experts"}
"""The key of `resources.engines` that each letter sets."""
TRAINER_SIZES = "dtce"
ROLES: Mapping[str, str] = {"sglang": "rollout", "fsdp": "actor"}
"""The backends that agentrl starts, and what each is for."""


def resources_of(text: str) -> dict[str, Any]:
    """The keys of `resources` that an allocation string stands for.

    Raises ValueError, in one line, for a string that is not one, and for a size or a backend that is not served.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"an allocation string has at most {MAX_LENGTH} characters")
    separators = re.findall(r"[+|]", text)
    items = [_item(item.strip(), text) for item in re.split(r"[+|]", text)]
    found = dict(items)
    if len(items) != 2 or found.keys() != ROLES.keys():
        raise ValueError(f"{text!r} must name engines and a trainer once each, for example sglang:d4t2+fsdp:d8")
    return {"engines": _engines(found["sglang"]), "trainer": _trainer(found["fsdp"]), "colocated": separators == ["|"]}


def _item(item: str, text: str) -> tuple[str, Sizes]:
    match = ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} in {text!r} is not BACKEND:SIZES, for example sglang:d4t2+fsdp:d8")
    backend, role = match["backend"] or "fsdp", match["role"]
    if backend not in ROLES:
        raise ValueError(f"there is no backend {backend!r}{did_you_mean(backend, ROLES)}")
    if role not in (None, ROLES[backend]):
        raise ValueError(
            f"{backend} has the role {ROLES[backend]!r}, not {role!r}: critic and reference share the trainer's ranks"
        )
    return backend, _sizes(match["sizes"], item)


def _sizes(sizes: str, item: str) -> Sizes:
    found = SIZE.findall(sizes)
    letters = [letter for letter, _ in found]
    if "".join(map("".join, found)) != sizes or len(set(letters)) < len(letters):
        raise ValueError(f"{item!r}: sizes are a letter and a number each, for example d4t2")
    return {letter: int(number) for letter, number in found}


def _engines(sizes: Sizes) -> dict[str, int]:
    _refuse(sizes, ENGINE_SIZES, "sglang")
    return {key: sizes[letter] for letter, key in ENGINE_SIZES.items() if letter in sizes}


def _trainer(sizes: Sizes) -> dict[str, int]:
    _refuse(sizes, TRAINER_SIZES, "fsdp")
    tensor, context = sizes.get("t", 1), sizes.get("c", 1)
    others = {key: sizes[letter] for letter, key in (("c", "context"), ("e", "experts")) if letter in sizes}
    return {"ranks": sizes.get("d", 1) * tensor * context, "tensor": tensor, **others}


def _refuse(sizes: Sizes, served: Mapping[str, str] | str, backend: str) -> None:
    names = {"p": "pipeline", "c": "context", "e": "expert"}
    for letter in sizes:
        if letter not in served and not (letter in names and sizes[letter] == 1):
            what = f"{names[letter]} parallel" if letter in names else f"size {letter!r}"
            raise ValueError(f"{backend} has no {what}: {letter}{sizes[letter]}; its sizes are {', '.join(served)}")

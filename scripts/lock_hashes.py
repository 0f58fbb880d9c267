"""Write the SHA-256 of every file that pip may take for each pin into lock files: `python scripts/lock_hashes.py`.

Run it after changing a version; `make setup` refuses a file with another hash. The hashes are those that PyPI lists for
Python 3.11 to 3.13 on Linux and macOS. Two locks have none for torch: its CPU build comes from PyTorch's own index.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

LOCKS = sorted((Path(__file__).parent.parent / "requirements").glob("*.lock"))
INDEX = "https://pypi.org/simple"
WITHOUT = {"cpu.lock": ("torch",), "vllm.lock": ("torch",)}
"""Lock file → pins that have no hashes in it."""
PYTHONS = re.compile(r"py3|py31[123]|cp31[123]")
LIMITED = re.compile(r"cp3\d+")
PLATFORMS = re.compile(r"any|(many|musl)linux.*|linux_.*|macosx_.*")


def main() -> None:
    """Rewrite the lock files that are named, else all of them."""
    with httpx.Client(headers={"Accept": "application/vnd.pypi.simple.v1+json"}, timeout=60) as http:
        for path in map(Path, sys.argv[1:]) if sys.argv[1:] else LOCKS:
            lines = [
                line.split(" \\")[0] for line in path.read_text().splitlines() if not line.startswith("    --hash")
            ]
            write = partial(locked, http, without=WITHOUT.get(path.name, ()))
            with ThreadPoolExecutor(8) as threads:
                path.write_text("".join(threads.map(write, lines)))


def locked(http: httpx.Client, line: str, without: tuple[str, ...]) -> str:
    """A line of a lock file, with hashes if it is a pin and its package is not in `without`."""
    pin, _, comment = map(str.strip, line.partition("#"))
    name, _, version = pin.partition("==")
    if not pin or name in without:
        return f"{line}\n"
    answer = http.get(f"{INDEX}/{canonicalize_name(name)}/").raise_for_status()
    hashes = sorted({one["hashes"]["sha256"] for one in answer.json()["files"] if fits(one["filename"], version)})
    if not hashes:
        sys.exit(f"{INDEX} has no file of {pin} for Python 3.11 to 3.13")
    above = f"# {name}: {comment}\n" if comment else ""
    return above + " \\\n".join([pin, *(f"    --hash=sha256:{one}" for one in hashes)]) + "\n"


def fits(filename: str, version: str) -> bool:
    """Whether a file is of this version, and of one of our Pythons and platforms."""
    try:
        if filename.endswith((".tar.gz", ".zip")):
            return str(parse_sdist_filename(filename)[1]) == version
        _, found, _, tags = parse_wheel_filename(filename)
    except ValueError:  # an egg, or a name from before the naming rules
        return False
    return str(found) == version and any(
        (PYTHONS.fullmatch(tag.interpreter) or (tag.abi == "abi3" and LIMITED.fullmatch(tag.interpreter)))
        and PLATFORMS.fullmatch(tag.platform)
        for tag in tags
    )


if __name__ == "__main__":
    main()

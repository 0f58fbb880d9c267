"""Make the pictures of the documentation from real runs: `python scripts/pictures.py FOLDER`, about five minutes.

It plays the tutorials' commands on a terminal of its own, in FOLDER, and writes the screens into docs/assets as SVG,
and the first tutorial's learning curve as PNG.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console  # noqa: TID251  it draws what was on a screen already
from rich.text import Text
from tutorial import blocks

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
WIDTH, HEIGHT = 100, 60
LIVE_AT_STEP = 12
FONTS = "DejaVu Sans Mono, Menlo, Consolas, monospace"
CONTROL = re.compile(r"(\x1b\[[?\d;]*[A-Za-z]|\r|\n)")
COLORS = re.compile(r"\x1b\[[\d;]*m")


class Screen:
    """The lines of a terminal, colours included, for the few control sequences that rich sends."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = 0

    def feed(self, text: str) -> None:
        """Apply some output."""
        for part in CONTROL.split(text):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part.endswith("A") and part.startswith("\x1b["):
                self.row = max(0, self.row - int(part[2:-1] or 1))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part != "\r" and (not part.startswith("\x1b") or part.endswith("m")):
                self.lines[self.row] += part

    def plain(self) -> list[str]:
        """The lines without colours."""
        return [COLORS.sub("", line) for line in self.lines]


def main() -> None:
    """Run the tutorials' commands, and write the pictures."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder, "first-agent.md")
    end = play(["agentrl", "train", "first.yaml"], folder, draw_live_panel())
    plain = end.plain()
    begin = max(i for i, line in enumerate(plain) if line.startswith("[")) + 1
    stop = next(i for i, line in enumerate(plain) if line.startswith("──"))
    draw("train-end", "agentrl train first.yaml", end.lines[begin:stop])
    shutil.copy(folder / "runs" / "first" / "curve.png", ASSETS)
    draw("status", "agentrl status --run first", play(["agentrl", "status", "--run", "first"], folder).lines)
    page = blocks("your-agent.md")
    program = next(block for block in page if block.title == "ask.py")
    (folder / program.title).write_text(program.text)
    report = play(["agentrl", "doctor", "--", "python", "ask.py", "drum", "lamp"], folder)
    begin = next(i for i, line in enumerate(report.plain()) if line.startswith("session "))
    draw("doctor", "agentrl doctor -- python ask.py drum lamp", report.lines[begin:])


def write_files(folder: Path, page: str) -> None:
    """Write the files that a tutorial has its reader write."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)


def draw_live_panel() -> Callable[[Screen], None]:
    """Draws the panel of `agentrl train` once, when LIVE_AT_STEP steps are done."""
    drawn = False

    def look(screen: Screen) -> None:
        nonlocal drawn
        shown = [line for line in screen.plain() if line.strip()]
        panel = [line for line in shown[-3:] if line.startswith(f"step {LIVE_AT_STEP}/")]
        if not drawn and panel and shown[-1].startswith("waiting for"):
            draw("train-live", "agentrl train first.yaml", [line for line in screen.lines if line.strip()])
            drawn = True

    return look


def play(command: Sequence[str], folder: Path, look: Callable[[Screen], None] = lambda screen: None) -> Screen:
    """Run a command on a terminal of WIDTH columns; `look` sees the screen after all output so far."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    env = os.environ | {"TERM": "xterm-256color", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=its, stdout=its, stderr=subprocess.DEVNULL)
    os.close(its)
    screen = Screen()
    with open(ours, encoding="utf-8", errors="replace", newline="", closefd=True, buffering=1) as terminal:
        while part := read(terminal):
            screen.feed(part)
            look(screen)
    process.wait()
    return screen


def read(terminal: io.TextIOWrapper) -> str:
    """Read some output; empty at the end, where Linux reports an error."""
    try:
        return terminal.readline()
    except OSError:
        return ""


def draw(name: str, title: str, lines: Sequence[str]) -> None:
    """Write some lines of a screen as SVG, with fonts that the reader has."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text.from_ansi("\n".join(line.rstrip() for line in lines).strip("\n")))
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = re.sub(r"font-family: [^;]+;", f"font-family: {FONTS};", template)
    svg = console.export_svg(title=title, code_format=template, unique_id=name)
    (ASSETS / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


if __name__ == "__main__":
    main()

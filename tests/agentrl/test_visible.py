import io
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentrl.console import Console
from agentrl.visible import LINES, LogFormatter, say, visible

ATTACKS = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x1b]52;c;aGk=\x07",
    "\x9b31m",
    "\x07",
    "\u202egnp",
    "\x00",
    "\ud800",
    "\x7f",
]


@given(st.text())
def test_what_is_shown_is_printable_and_printable_text_is_unchanged(text):
    shown = visible(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


@given(st.text())
def test_a_text_of_several_lines_keeps_its_lines(text):
    assert visible(text, LINES).count("\n") == text.count("\n")


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_way_to_print_lets_a_control_character_through(attack, capsys):
    say(f"a{attack}b")
    say(f"a{attack}b", err=True)
    printed = "".join(capsys.readouterr())
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    table = Table("name")
    table.add_row(f"a{attack}b")
    console.print(f"a{attack}b", Text(f"a{attack}b"), table)
    with Live(Text(f"a{attack}b"), console=console, auto_refresh=False):
        pass
    assert attack not in printed
    assert attack not in out.getvalue()
    assert repr(attack[:1])[1:-1] in printed  # rich itself drops BEL


def test_the_console_still_draws_in_colour_and_moves_its_own_cursor():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    console.print(Text("failed", style="red"))
    console.clear()
    assert "\x1b[31mfailed" in out.getvalue()
    assert "\x1b[2J" in out.getvalue()


def test_text_is_not_read_as_console_markup():
    out = io.StringIO()
    Console(file=out).print("[/nonsense] [red]x[/red] :smile:")
    assert out.getvalue() == "[/nonsense] [red]x[/red] :smile:\n"


def test_a_log_message_is_one_line_and_its_traceback_keeps_its_lines():
    try:
        raise ValueError("no\x1b[2J")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("agentrl", logging.ERROR, "f.py", 1, "call %s\nforged line\x1b[2J", ("x\x07",), error)
    shown = LogFormatter("%(levelname)s %(message)s").format(record)
    first, *rest = shown.split("\n")
    assert first == "ERROR call x\\x07\\nforged line\\x1b[2J"
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: no\\x1b[2J"

"""Which answers may be given to generators of reasoning-gym that evaluate an answer as Python.

They call `eval` or SymPy's `parse_expr`, which would run any code that the model writes. An answer that is no list of
plain values, or no formula, is replaced by a text that the generator cannot read, and scored as such.
"""

from __future__ import annotations

import builtins
import re

from agentrl.environments.optional_import import library

LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Generators that call `eval`."""
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Generators that call `parse_expr`, in which every builtin function of Python has its name."""
FUNCTIONS = frozenset(
    [
        *("abs", "Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp", "log"),
        *("nan", "sec", "sin", "sinh", "sqrt", "tan", "tanh"),
    ]
)
LIST = re.compile(r"[\w\s\[\],.'\"-]*", re.ASCII)
"""Without parentheses nothing can be called."""
FORMULA = re.compile(r"[\w\s+*/^().,|-]*", re.ASCII)
NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
LONGEST_SYMBOL = 2
UNREADABLE = "?"


def readable(name: str, answer: str) -> str:
    """The answer if the generator `name` may read it; else a text that it cannot read."""
    if name in LISTS and not LIST.fullmatch(answer):
        return UNREADABLE
    if name in FORMULAS and not is_formula(answer):
        return UNREADABLE
    return answer


def is_formula(answer: str) -> bool:
    """Whether a text has only numbers, operators, symbols and functions of mathematics. A symbol is a name that neither
    Python nor SymPy has, or one of at most two characters.
    """
    sympy = library("sympy")  # which reasoning-gym needs
    if not FORMULA.fullmatch(answer) or re.search(r"\.\s*[^\W\d]", answer):
        return False
    names = {name for name in NAME.findall(answer) if len(name) > LONGEST_SYMBOL} - FUNCTIONS
    return not any("__" in name or hasattr(builtins, name) or hasattr(sympy, name) for name in names)

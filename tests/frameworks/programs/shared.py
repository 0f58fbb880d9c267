"""What the programs here share: the conversation, the calculator behind the tool, and what is printed at the end."""

import ast
import json
import operator
import sys

STREAM = "--stream" in sys.argv
VARIANT = sys.argv[1]
MODEL = "default"
MAX_TOKENS = 40
SYSTEM = "Use the calculator."
QUESTIONS = ("What is 12 plus 35?", "And twice that?")
SIGNS = {ast.Add: operator.add, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """Value of a sum or product of two whole numbers. Raises ValueError for anything else."""
    match ast.parse(expression.strip(), mode="eval").body:
        case ast.BinOp(ast.Constant(int(x)), ast.Add() | ast.Mult() as sign, ast.Constant(int(y))):
            return str(SIGNS[type(sign)](x, y))
    raise ValueError(f"cannot work out {expression!r}")


def report(answers: list[str], pieces: int) -> None:
    """Print what the agent answered, and in how many pieces of text it arrived if it was streamed."""
    print()  # smolagents leaves a line unfinished
    print(json.dumps({"answers": answers, "pieces": pieces}))

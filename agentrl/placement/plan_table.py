"""The lines that show an assignment before anything starts."""

from __future__ import annotations

from agentrl.placement.assignment import Assignment, Share

HEADER = ("part", "processes", "host", "GPUs")


def plan_lines(assignment: Assignment) -> list[str]:
    """A table with a line for each part and host."""
    rows = [HEADER]
    for part in assignment.parts:
        for number, share in enumerate(part.shares):
            first = (part.part, str(part.processes)) if number == 0 else ("", "")
            rows.append((*first, share.host, gpu_text(share)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def gpu_text(share: Share) -> str:
    """The GPUs of a share: consecutive numbers as a range, `CPU` without any."""
    if not share.gpus:
        return "CPU"
    if all(gpu.isdecimal() for gpu in share.gpus):
        numbers = [int(gpu) for gpu in share.gpus]
        if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(share.gpus)

"""Truncates an answer at stop strings, and after its first tool call if the request allows only one."""

from __future__ import annotations

from agentrl.rendering import ContentDelta, Delta, ParsedOutput, ToolCallDelta


class Delivered:
    """Cuts content before the first complete stop string, and holds back text that may be the start of one.

    Only the delivered answer is cut (OpenAI's `stop` and `parallel_tool_calls`); the recorded tokens are complete.
    """

    def __init__(self, stops: list[str], *, one_call: bool = False) -> None:
        self._stops = stops
        self._one_call = one_call
        self._held = ""
        self._sent = ""
        self.stop: str | None = None  # the stop string that was found

    def push(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas that may be delivered now."""
        if self._one_call:
            deltas = [delta for delta in deltas if not (isinstance(delta, ToolCallDelta) and delta.index > 0)]
        if not self._stops:
            return deltas
        result: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, ContentDelta):
                result.append(delta)
            elif text := self._release(delta.text):
                result.append(ContentDelta(text))
        return result

    def finish(self, parsed: ParsedOutput) -> ParsedOutput:
        """The message as it is delivered, and the last deltas."""
        last = self.push(parsed.deltas)
        calls = parsed.tool_calls[:1] if self._one_call else parsed.tool_calls
        if not self._stops:
            return ParsedOutput(parsed.content, parsed.reasoning, calls, last)
        if self._held and self.stop is None:
            self._sent += self._held
            last.append(ContentDelta(self._held))
        content = self._sent if parsed.content is not None else None
        return ParsedOutput(content, parsed.reasoning, calls, last)

    def _release(self, text: str) -> str:
        if self.stop is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.stop = min(found)
            self._held, out = "", text[:start]
        else:
            keep = max(_overlap(text, stop) for stop in self._stops)
            out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._sent += out
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

"""Stop strings in what the client reads: the text ends before the first of them, also across deltas."""

from __future__ import annotations

from agentrl.rendering import ContentDelta, Delta, ParsedOutput


class StopText:
    """Cuts content before the stop string that is complete first, holding back text that may be the start of one.

    The recorded tokens stay whole; only the delivered text is cut (OpenAI's `stop`).
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""
        self._sent = ""
        self._done = False

    def push(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas that may be sent."""
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
        """The message with its content cut, and the last deltas."""
        if not self._stops:
            return parsed
        last = self.push(parsed.deltas)
        if self._held and not self._done:
            self._sent += self._held
            last.append(ContentDelta(self._held))
        content = self._sent if parsed.content is not None else None
        content = self._sent if parsed.content is not None else None
        return ParsedOutput(content, parsed.reasoning, parsed.tool_calls, last)

    def _release(self, text: str) -> str:
        if self._done:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start = min(found)
            self._done, self._held, out = True, "", text[:start]
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

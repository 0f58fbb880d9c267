"""One attempt to sample a call's answer: parses tokens as they come, and emits the parts that may be delivered already.

event of the engine ─► parser ─► stop strings ─► deltas ─┬► before the first tool call: emitted at once
                                                         └► from the first tool call on: held back for the commit
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.pending_call import Call
from agentrl.proxy.calls.prompts.prompt_options import parser_after
from agentrl.proxy.calls.sampling.sample_segment import Sampled
from agentrl.proxy.calls.sampling.sampling import SampleRequest, sample
from agentrl.proxy.calls.sampling.stop_strings import Delivered
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, Tokens, message_of
from agentrl.rendering import Delta, ToolCallDelta

Emit = Callable[[AnswerDelta | Answer], None]


class Attempt:
    """Samples and parses a call's answer once."""

    def __init__(self, context: CallContext, call: Call, emit: Emit) -> None:
        self._context = context
        self._call = call
        self._emit = emit
        prompt = call.prompt
        n_opening = len(prompt.opening)
        before = prompt.token_ids[:-n_opening] if n_opening else prompt.token_ids
        self._parser = parser_after(context, call.request, before)
        self._delivered = Delivered(call.request.stop, one_call=not call.request.parallel_tool_calls)
        self._kept = 0  # how many sampled tokens belong to the answer
        self._began = time.perf_counter()
        self.sampled = Sampled()
        self.emitted = False  # a client may have received a part: the answer cannot be sampled again
        self.held_back: list[Delta] = []  # from the first tool call on: delivered after the commit

    async def sample(self, deadline: float) -> None:
        """Sample the answer, and emit the parts that may be delivered before the commit.

        Raises RequestError and Interrupted as `sampling.sample` does.
        """
        call = self._call
        self._push(call.prompt.opening, Tokens([], []))
        await sample(
            self._context.pool,
            self.sampled,
            self._take,
            SampleRequest(
                session_id=call.session_id,
                rid=call.id,
                prompt_ids=call.prompt.token_ids,
                params=call.params,
                own_seed=call.own_seed,
                deadline=deadline,
                top_logprobs=call.top_logprobs,
                routing=call.routing,
                routed_from=call.prompt.inherited_rows,
                whole=not call.request.stream,
            ),
        )

    def _take(self, tokens: Tokens) -> None:
        """Parse the tokens of an event, and emit them to a client that streams."""
        if not self._kept:
            self._context.metrics.stage("first_token", self._began)
        for part in self._parts(tokens):
            if self._delivered.stop is not None and self.sampled.resumed:
                break  # the stop string began in an earlier segment, so the engine did not see it
            delta = self._push(part.ids, part)
            self._kept += len(part.ids)
            if delta is not None and self._call.request.stream:
                self.emitted = True
                self._emit(delta)

    def answer(self) -> Answer:
        """The whole answer, once `sample` has returned."""
        parsed = self._delivered.finish(self._parser.finish())
        self.held_back += parsed.deltas
        sampled, call = self.sampled, self._call
        sampled.keep(self._kept)
        reason = sampled.finish_reason or "stop"
        if self._delivered.stop is not None:  # the engine says `length` if the last token completes it
            reason = "stop"
        if reason == "stop" and parsed.tool_calls:
            reason = "tool_calls"
        return Answer(
            interaction_id=call.id,
            message=message_of(parsed),
            finish_reason=reason,
            stop=self._delivered.stop,
            prompt_ids=call.prompt.token_ids,
            cached_tokens=sampled.cached_tokens or 0,
            tokens=sampled.tokens.best(call.request.top_logprobs),
            versions=[[s.version, s.start, s.end] for s in sampled.spans],
        )

    def _parts(self, tokens: Tokens) -> list[Tokens]:
        """The tokens of an event; one by one if a stop string of an earlier segment may end at any of them."""
        if not (self.sampled.resumed and self._call.request.stop):
            return [tokens]
        ids, logprobs, top = tokens.ids, tokens.logprobs, tokens.top
        return [Tokens(ids[i : i + 1], logprobs[i : i + 1], top and top[i : i + 1]) for i in range(len(ids))]

    def _push(self, ids: Sequence[int], tokens: Tokens) -> AnswerDelta | None:
        """Parse some ids; the delta that may be delivered at once, if any."""
        deltas = self._delivered.push(self._parser.push(ids))
        tool_calls = (i for i, delta in enumerate(deltas) if isinstance(delta, ToolCallDelta))
        first_late = 0 if self.held_back else next(tool_calls, len(deltas))
        shown = deltas[:first_late]
        self.held_back += deltas[first_late:]
        if shown or (self._call.request.logprobs and tokens.ids):
            return AnswerDelta(shown, tokens.best(self._call.request.top_logprobs))
        return None

"""OpenAI Agents SDK. `responses` is its default model class, `chat` its Chat Completions model.

`server`: the server keeps the conversation. `subagent`: another agent stands behind the tool.
"""

import asyncio

from agents.result import RunResultBase
from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, VARIANT, calculate, report

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions" if VARIANT == "chat" else "responses")
settings = ModelSettings(max_tokens=MAX_TOKENS)


@function_tool
def calc(expression: str) -> str:
    """Work out an arithmetic expression."""
    return calculate(expression)


adder = Agent(name="Adder", instructions="Say the number.", model=MODEL, tools=[calc], model_settings=settings)
tool = adder.as_tool("calc", "Work out an arithmetic expression.") if VARIANT == "subagent" else calc
agent = Agent(name="Calculator", instructions=SYSTEM, model=MODEL, tools=[tool], model_settings=settings)
pieces = 0


async def run(items: list, **options: object) -> RunResultBase:
    global pieces
    if not STREAM:
        return await Runner.run(agent, items, max_turns=4, **options)
    result = Runner.run_streamed(agent, items, max_turns=4, **options)
    async for event in result.stream_events():
        pieces += event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    return result


async def main() -> None:
    items: list = []
    last = None
    answers = []
    for question in QUESTIONS:
        asked = {"role": "user", "content": question}
        if VARIANT == "server":
            result = await run([asked], previous_response_id=last, auto_previous_response_id=True)
        else:
            result = await run([*items, asked])
        answers.append(result.final_output)
        items, last = result.to_input_list(), result.last_response_id
    report(answers, pieces)


asyncio.run(main())

"""OpenAI Agents SDK. `responses` is its default model class, `chat` its Chat Completions model."""

import asyncio

from agents.result import RunResultBase
from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, VARIANT, calculate, report

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("responses" if VARIANT == "responses" else "chat_completions")


@function_tool
def calc(expression: str) -> str:
    """Work out an arithmetic expression."""
    return calculate(expression)


agent = Agent(
    name="Calculator",
    instructions=SYSTEM,
    model=MODEL,
    tools=[calc],
    model_settings=ModelSettings(max_tokens=MAX_TOKENS),
)
pieces = 0


async def run(items: list) -> RunResultBase:
    global pieces
    if not STREAM:
        return await Runner.run(agent, items, max_turns=4)
    result = Runner.run_streamed(agent, items, max_turns=4)
    async for event in result.stream_events():
        pieces += event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    return result


async def main() -> None:
    items: list = []
    answers = []
    for question in QUESTIONS:
        result = await run([*items, {"role": "user", "content": question}])
        answers.append(result.final_output)
        items = result.to_input_list()
    report(answers, pieces)


asyncio.run(main())

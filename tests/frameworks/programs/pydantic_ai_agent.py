"""Pydantic AI over Chat Completions (`chat`), Responses (`responses`) or Messages (`anthropic`)."""

import asyncio

from pydantic_ai import Agent, ModelMessage
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, VARIANT, calculate, report

models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "anthropic": AnthropicModel}
agent = Agent(models[VARIANT](MODEL), instructions=SYSTEM, model_settings={"max_tokens": MAX_TOKENS})


@agent.tool_plain
def calc(expression: str) -> str:
    """Work out an arithmetic expression."""
    return calculate(expression)


async def main() -> None:
    history: list[ModelMessage] = []
    answers = []
    pieces = 0
    for question in QUESTIONS:
        if STREAM:
            async with agent.run_stream(question, message_history=history) as result:
                texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
                pieces += len(texts)
                answers.append("".join(texts))
        else:
            result = await agent.run(question, message_history=history)
            answers.append(result.output)
        history = result.all_messages()
    report(answers, pieces)


asyncio.run(main())

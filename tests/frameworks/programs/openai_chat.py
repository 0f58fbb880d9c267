"""The official openai SDK: a loop over Chat Completions. The history grows by the SDK's own message objects."""

import json

import openai
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel
from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, calculate, report


class calc(BaseModel):
    """Work out an arithmetic expression."""

    expression: str


client = openai.OpenAI()
messages: list = [{"role": "system", "content": SYSTEM}]
options = {"model": MODEL, "tools": [openai.pydantic_function_tool(calc)], "max_completion_tokens": MAX_TOKENS}
answers: list[str] = []
pieces = 0


def complete() -> ChatCompletionMessage:
    global pieces
    if not STREAM:
        return client.chat.completions.create(messages=messages, **options).choices[0].message
    with client.chat.completions.stream(messages=messages, **options) as stream:
        pieces += sum(event.type == "content.delta" for event in stream)
        return stream.get_final_completion().choices[0].message


for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while True:
        message = complete()
        messages.append(message)
        if not message.tool_calls:
            answers.append(message.content or "")
            break
        for call in message.tool_calls:
            result = calculate(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

report(answers, pieces)

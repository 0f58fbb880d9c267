"""The official anthropic SDK: a loop over Messages."""

import anthropic
from anthropic.types import Message
from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, calculate, report

client = anthropic.Anthropic()
tool = {
    "name": "calc",
    "description": "Work out an arithmetic expression.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
messages: list = []
answers: list[str] = []
pieces = 0


def create() -> Message:
    global pieces
    request = {"model": MODEL, "system": SYSTEM, "tools": [tool], "max_tokens": MAX_TOKENS, "messages": messages}
    if not STREAM:
        return client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        pieces += sum(1 for _ in stream.text_stream)
        return stream.get_final_message()


for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while True:
        message = create()
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            answers.append("".join(block.text for block in message.content if block.type == "text"))
            break
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": calculate(block.input["expression"])}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})

report(answers, pieces)

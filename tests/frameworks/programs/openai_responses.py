"""The official openai SDK: a loop over Responses. `stateful`: the server keeps the conversation; `stateless`: we do."""

import json

import openai
from openai.types.responses import Response
from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, VARIANT, calculate, report

client = openai.OpenAI()
tool = {
    "type": "function",
    "name": "calc",
    "description": "Work out an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    "strict": True,
}
options = {"model": MODEL, "instructions": SYSTEM, "tools": [tool], "max_output_tokens": MAX_TOKENS}
answers: list[str] = []
pieces = 0
history: list = []
last: Response | None = None


def respond(items: list) -> Response:
    global pieces
    if VARIANT == "stateful":
        request = options | {"input": items} | ({"previous_response_id": last.id} if last else {})
    else:
        history.extend(items)
        request = options | {"input": history}
    if not STREAM:
        return client.responses.create(**request)
    with client.responses.stream(**request) as stream:
        pieces += sum(event.type == "response.output_text.delta" for event in stream)
        return stream.get_final_response()


for question in QUESTIONS:
    items: list = [{"role": "user", "content": question}]
    while items:
        last = respond(items)
        history += last.output
        items = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": calculate(json.loads(item.arguments)["expression"]),
            }
            for item in last.output
            if item.type == "function_call"
        ]
    answers.append(last.output_text)

report(answers, pieces)

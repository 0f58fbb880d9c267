"""The official openai SDK: Completions, where the program writes the prompt, and the tool call is text."""

import openai
from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, calculate, report

client = openai.OpenAI()
answers: list[str] = []
pieces = 0


def complete(prompt: str) -> str:
    global pieces
    options = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS}
    if not STREAM:
        return client.completions.create(**options).choices[0].text
    texts = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True) if chunk.choices]
    pieces += sum(bool(text) for text in texts)
    return "".join(texts)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"


prompt = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
for question in QUESTIONS:
    prompt += turn("user", question)
    said = complete(prompt)
    while said.startswith("calc("):
        prompt += f"{said}<|im_end|>\n" + turn("tool", calculate(said.removeprefix("calc(").removesuffix(")")))
        said = complete(prompt)
    prompt += f"{said}<|im_end|>\n"
    answers.append(said)

report(answers, pieces)

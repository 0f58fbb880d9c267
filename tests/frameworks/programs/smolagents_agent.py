"""smolagents' ToolCallingAgent: it asks for a tool call at every step (`required`) unless told otherwise (`auto`)."""

from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, VARIANT, calculate, report
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES
from smolagents.models import ChatMessageStreamDelta


@tool
def calc(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Two whole numbers and a sign.
    """
    return calculate(expression)


agent = ToolCallingAgent(
    tools=[calc],
    model=OpenAIModel(MODEL, max_tokens=MAX_TOKENS, tool_choice=VARIANT),
    prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": SYSTEM},
    max_steps=3,
    stream_outputs=STREAM,
    verbosity_level=LogLevel.OFF,
)
answers: list[str] = []
pieces = 0

for question in QUESTIONS:
    if STREAM:
        for event in agent.run(question, stream=True, reset=not answers):
            pieces += isinstance(event, ChatMessageStreamDelta)
        answers.append(str(event.output))
    else:
        answers.append(str(agent.run(question, reset=not answers)))

report(answers, pieces)

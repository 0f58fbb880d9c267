"""LangGraph's prebuilt ReAct agent, over ChatOpenAI (`openai`, `responses`) or ChatAnthropic (`anthropic`)."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent
from shared import MAX_TOKENS, MODEL, QUESTIONS, STREAM, SYSTEM, VARIANT, calculate, report


@tool
def calc(expression: str) -> str:
    """Work out an arithmetic expression."""
    return calculate(expression)


options = {"model": MODEL, "max_tokens": MAX_TOKENS, "streaming": STREAM}
if VARIANT == "anthropic":
    model = ChatAnthropic(**options)
else:
    model = ChatOpenAI(**options, use_responses_api=VARIANT == "responses")
agent = create_react_agent(model, [calc], prompt=SYSTEM, checkpointer=InMemorySaver())
config = {"configurable": {"thread_id": "1"}, "recursion_limit": 8}
answers: list[str] = []
pieces = 0

for question in QUESTIONS:
    request = {"messages": [("user", question)]}
    if STREAM:
        for chunk, _ in agent.stream(request, config, stream_mode="messages"):
            pieces += isinstance(chunk, AIMessageChunk) and bool(chunk.text)
    else:
        agent.invoke(request, config)
    answers.append(agent.get_state(config).values["messages"][-1].text)

report(answers, pieces)

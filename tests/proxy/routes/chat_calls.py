"""A call of Chat Completions through the official SDK, and a tool."""

HELLO = [{"role": "user", "content": "abcd"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
]


def ask(proxy, session, messages=HELLO, **options):
    return proxy.sdk(session).chat.completions.create(model="test", messages=messages, **options)

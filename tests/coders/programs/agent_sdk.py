"""The Claude Agent SDK as a user writes it: one query with a shell tool; the last line of the output is the result."""

import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query


async def main() -> None:
    options = ClaudeAgentOptions(allowed_tools=["Bash"])
    async for message in query(prompt=sys.argv[1], options=options):
        if isinstance(message, ResultMessage):
            print(message.result)
            sys.exit(1 if message.is_error else 0)


asyncio.run(main())

"""The Claude Agent SDK as a user writes it: one query with a shell tool; the output is the result."""

import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query


async def main() -> bool:
    failed = True
    async for message in query(prompt=sys.argv[1], options=ClaudeAgentOptions(allowed_tools=["Bash"])):
        if isinstance(message, ResultMessage):
            print(message.result)
            failed = message.is_error
    return failed


sys.exit(asyncio.run(main()))

"""Workflows: `async def arun_episode(engine, data)` with token ids in and out, as AReaL defines them."""

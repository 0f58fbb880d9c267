"""Tools that a model calls: what they are, how long they live, and the loop that serves them.

tool_entries.py   the names of a config, or the objects of an agent  ──►  sources, which live as long as the worker
toolbox.py        source.open(episode)  ──►  open tools: called, rewarded, released exactly once
tool_loop.py      model ──tool calls──► toolbox ──results──► model …  until it answers or a budget is spent
tool_agent.py     the loop as a ready-made agent

function_tool.py  @tool on a function or a method
object_tools.py   classes whose @tool methods are tools
users/            simulated users, who answer the model
verl/             tools written for verl
mcp_tools.py      the tools of an MCP server  ──►  mcp_connection.py  ──►  mcp_process.py
"""

"""Entry point of `python -m agentrl`, the same as `agentrl`."""

from agentrl.cli.main import main

main()

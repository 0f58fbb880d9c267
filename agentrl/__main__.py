"""`python -m agentrl` is `agentrl`."""

from agentrl.cli.main import main

main()

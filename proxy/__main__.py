"""`python -m agentrl.proxy` is `agentrl proxy`."""

import typer

from agentrl.cli.proxy import proxy

typer.run(proxy)

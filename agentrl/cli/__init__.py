"""The `agentrl` command: one file per subcommand. Heavy imports happen inside the commands."""

"""Real training runs that are killed again and again, and what must be true of them afterwards.

agent       plays the episodes; writes down on its own side what it received and what was acknowledged
run         `agentrl train` as a child process: start, find its parts, kill them, follow it, end it
killer      which part dies when, from a seed
losses      what the database owes the agent's notes, by plain SQL
"""

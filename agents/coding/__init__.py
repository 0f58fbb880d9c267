"""A coding agent (Claude Code, Codex, … or a program of yours) repairs a small repository; its tests give the reward.

coding_programs.py   how each program is called, and the home that it gets
coding_agent.py      the episode: make the repository, run the program, run the tests
broken_modules.py    tasks: small modules with one wrong line
"""

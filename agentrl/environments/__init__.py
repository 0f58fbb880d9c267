"""Adapters of environment libraries: sources of tasks, reward functions and agents that a config names.

The libraries are imported when an adapter is used. `pip install 'agentrl[gyms]'` installs those that run in the
process of agentrl; the others have a Python environment of their own.
"""

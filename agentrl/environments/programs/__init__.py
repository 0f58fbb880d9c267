"""Programs that run episodes of libraries with a Python environment of their own. They import nothing of agentrl.

agentrl/environments/foreign.py starts them: `PYTHON FILE N`, N an open socket, or `PYTHON FILE tasks SETTINGS`.
"""

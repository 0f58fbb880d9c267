"""The prompt of a call: the exact tokens of an earlier call and their continuation, or a full rendering and a fork
reason.
"""

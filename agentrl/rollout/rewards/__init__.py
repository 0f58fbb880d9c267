"""Reward functions: they run in processes of their own, with time-outs and retries.

agent ─► answer_scorer.py ──(one attempt)──► reward_pool.py ─► reward_process.py ══ socket ══► reward_host.py ─► f()
            │ retries, weights                                                             │ function_call.py
            └ group_batches.py: one call for a whole group                                 └ function_value.py
"""

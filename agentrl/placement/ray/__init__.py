"""The scheduler Ray.

ray_placement    a placement group a part, an actor a rank
ray_runner       the actor: keeps one task runner running behind a guard
ray_connection   finds the cluster
"""

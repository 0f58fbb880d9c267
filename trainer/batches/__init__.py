"""A step's batch on each rank: outlines of all of it, and the tokens of this rank's share.

    rank 0 leases ─► outlines ∀ ─► shares ∀ ─► tokens of the share ∀ (cache, else store) ─► packs ∀ ─► microbatches ∀

∀ marks what every rank does. No rank sends tokens to another.
"""

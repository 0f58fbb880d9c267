"""SFT, DPO and reward models on the trainer's engine: its packing, its model, its checkpoints.

The invariant: what step k computes is a function of (data, configuration, k) alone. Its items are the k-th piece of an
order that the seed gives; its loss is a mean over all of their tokens (SFT) or pairs, however they were cut into
microbatches and ranks; weights and moments are those of step k − 1, trained or loaded. A resumed run is the run.
"""

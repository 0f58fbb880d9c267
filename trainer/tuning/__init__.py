"""SFT, DPO and reward models, on the packing, models and checkpoints of the trainer.

Invariant: step k computes a function of the data, the configuration and k alone. Its items are the k-th piece of an
order given by the seed. Its loss is a mean over all of their tokens (SFT) or pairs, however they are cut into
microbatches and ranks. Its weights and moments are those of step k − 1, trained or loaded. So a resumed run computes
what an uninterrupted run computes.
"""

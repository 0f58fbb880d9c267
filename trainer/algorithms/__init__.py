"""The mathematics of policy updates: pure functions of tensors, one file per part of an algorithm."""

"""Running averages over the steps of a run: of the weights, and of the noise of gradients."""

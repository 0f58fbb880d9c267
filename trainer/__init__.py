"""The trainer: batches of trajectories in, weight versions out."""

import warnings

# transformers imports torchvision for models that see; none of ours do
warnings.filterwarnings("ignore", message="Failed to load image Python extension")

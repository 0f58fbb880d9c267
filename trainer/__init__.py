"""The trainer: takes batches of trajectories from the store and makes weight versions."""

import warnings

# transformers imports torchvision for vision models, which the trainer does not use
warnings.filterwarnings("ignore", message="Failed to load image Python extension")

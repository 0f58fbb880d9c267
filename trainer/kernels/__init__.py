"""Modules of transformers' models, computed by PyTorch's fused kernels."""

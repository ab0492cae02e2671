"""CUDA driver, kernels and packing on one GPU."""

"""CUDA sources of the kernels (files beside this module)."""

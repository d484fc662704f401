"""Benchmarks of the kernels: speed, accuracy, determinism, memory, and the paper's tables."""

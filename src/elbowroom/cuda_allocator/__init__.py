"""Planned addresses on a CUDA device: a library in C, which PyTorch has its memory from."""

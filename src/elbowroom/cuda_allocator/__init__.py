"""A pluggable CUDA allocator, written in C, that serves PyTorch's requests at planned addresses."""

"""Allocators give buffers offsets: one file an allocator, entry point `assign(buffers, capacity_bytes=None) -> Layout`.

Each takes any alignment, pinned offsets and buffers that wrap, or refuses them with a sentence. Each raises TraceError
for buffers that no layout can be for, and ArenaTooSmall where its layout, or any, does not fit the capacity.
"""

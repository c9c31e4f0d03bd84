"""Allocators assign offsets: one file per allocator, entry point `assign(buffers, capacity_bytes=None) -> Layout`.

Each supports any alignment, pinned offsets and buffers that wrap, or raises UsageError. Each raises TraceError for
buffers that have no valid layout, and ArenaTooSmall if its layout (or every layout) exceeds the capacity.
"""

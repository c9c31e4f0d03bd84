"""Offsets for buffers in an arena: allocators, the search behind them, and pools to compare with."""

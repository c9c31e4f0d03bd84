"""A running step -> Trace: on fake tensors (nothing is allocated) or live."""

"""Captures a Trace of a step: on fake tensors (nothing is allocated) or live."""

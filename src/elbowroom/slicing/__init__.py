"""Ops in slices: the rules that say how an op can be cut, and calls of its kernel on slices."""

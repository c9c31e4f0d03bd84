"""Decides which ops of a step run in slices."""

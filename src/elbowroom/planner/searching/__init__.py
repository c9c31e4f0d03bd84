"""Searches for a choice in every gap: simulated annealing, and branch and bound for small steps."""

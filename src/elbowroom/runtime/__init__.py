"""Carries the residency machine's actions out while the user's own step runs."""

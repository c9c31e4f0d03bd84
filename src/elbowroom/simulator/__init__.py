"""Simulates a step, planned or under an online policy: the residency machine on a virtual clock."""

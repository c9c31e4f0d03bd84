"""Simulates one step of several ranks: the planned step of one device, and collectives on its network lane."""

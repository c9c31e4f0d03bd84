"""Computes a storage again: which ops that takes, what they read, and their seconds and bytes."""

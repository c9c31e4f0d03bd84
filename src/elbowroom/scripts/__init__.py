"""Runs unchanged training scripts within a budget."""

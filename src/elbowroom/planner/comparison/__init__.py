"""Compares strategies, budgets and batch sizes."""

"""Renders results as text and HTML."""

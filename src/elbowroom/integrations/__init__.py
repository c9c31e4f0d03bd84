"""Integrations with training frameworks. Each module imports its framework; import the one that you use."""

"""Compiled simulator, which the planner calls hundreds of thousands of times."""

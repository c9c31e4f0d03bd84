"""Searches through vectors of choices, scored by the compiled simulator."""

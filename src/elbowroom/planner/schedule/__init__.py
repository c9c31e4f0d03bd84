"""Turns a choice for each gap into ticks, and those into a Plan."""

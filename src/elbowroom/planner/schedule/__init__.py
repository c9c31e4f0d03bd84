"""Choices for gaps -> ticks -> Plan."""

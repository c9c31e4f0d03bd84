"""Trace + Costs + budget -> Plan."""

"""Strategies make plans ahead of time: one file a strategy, entry point `make_plan(problem) -> Plan`."""

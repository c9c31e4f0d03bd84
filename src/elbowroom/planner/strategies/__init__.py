"""Strategies that plan ahead of time: one file each, with the entry point `make_plan(problem) -> Plan`."""

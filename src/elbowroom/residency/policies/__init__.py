"""Policies decide during a step which storages leave, how, and which come back early: one file a policy, entry point
`Policy`.
"""

RENAMED = {"habit": "predictive"}
"""Former names, which still work with a `FutureWarning`."""

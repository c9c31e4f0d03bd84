"""Policies decide during a step which storages to evict, how, and which to reload early: one file per policy, entry
point `Policy`.
"""

RENAMED = {"habit": "predictive"}
"""Former names, which still work with a `FutureWarning`."""

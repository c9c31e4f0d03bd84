"""Policies decide online what leaves and what comes back: one file a policy, entry point `Policy`."""

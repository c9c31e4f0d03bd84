"""Policies decide online what leaves, how, and what comes back early: one file a policy, entry point `Policy`."""

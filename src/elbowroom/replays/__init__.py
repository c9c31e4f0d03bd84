"""Recomputation of a storage: the ops to replay, the storages that they read, and their cost."""

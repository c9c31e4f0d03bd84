"""Trace + HardwareProfile -> Costs: how long each op and transfer takes, and what an op allocates inside itself."""

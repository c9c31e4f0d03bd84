"""Cost model: Trace + HardwareProfile -> Costs (seconds of ops and transfers, and the workspace of ops)."""

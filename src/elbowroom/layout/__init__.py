"""Where blocks lie in an arena."""

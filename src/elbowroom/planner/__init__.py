"""Planning: trace + costs + budget -> plan."""

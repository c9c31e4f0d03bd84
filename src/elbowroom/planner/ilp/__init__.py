"""Integer programs: small models of a step, and limits for the solver."""

"""Integer programmes: small models of a step, and how long a solver may take."""

"""Lower bounds on the step time, and the linear programme that proves them."""

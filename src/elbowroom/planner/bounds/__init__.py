"""Lower bounds on the step time, and the linear program that proves them."""

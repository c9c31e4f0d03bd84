"""Demo: real models trained plain and then within a budget, each in its own process."""

"""The simulator in machine code, as the planner calls it hundreds of thousands of times."""

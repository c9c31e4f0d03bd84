"""The page: one HTML file that shows a step over time, without a network."""

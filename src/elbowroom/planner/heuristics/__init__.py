"""Rules of the published planners, shared by several strategies."""

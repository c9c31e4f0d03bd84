"""Hardware profiles: measured by `probe`, or shipped with the package (`shipped`, which does not import torch)."""

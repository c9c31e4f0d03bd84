"""This machine, or one on paper -> HardwareProfile: measured speeds and capacities, and shipped ones.

`probe` measures and needs torch; `shipped` only reads files and does not.
"""

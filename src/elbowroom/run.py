"""`python -m elbowroom.run` runs an unchanged training script within a budget, as `elbowroom run` does.

For torchrun: `torchrun --nproc-per-node 2 -m elbowroom.run --memory-budget 20GiB train.py ARGUMENTS`.
"""

from __future__ import annotations

import sys

from elbowroom.scripts.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="python -m elbowroom.run"))

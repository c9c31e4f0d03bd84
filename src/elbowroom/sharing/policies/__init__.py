"""Policies share a device's bytes among jobs: one file per policy, entry point `allot`.

    allot(demands, capacity_bytes) -> bytes of each admitted job; the others wait

Each admitted job gets at least its floor, and all together get at most the capacity. Each docstring states how long a
job may wait: n jobs, a quantum q (`Broker`), steps of at most s seconds, in which time to move state is included.
"""

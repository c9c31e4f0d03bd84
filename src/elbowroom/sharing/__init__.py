"""Several jobs on one device: a broker leases the device's bytes to the jobs that share it.

    job: front, floor, state -->  broker core  --> leases, taken up between two steps
                                  (policy: who runs, within how many bytes)

The core (`broker.py` and what it imports) knows no clock, no sockets and no torch: events come in, messages go out.
`transport` runs it on a Unix socket, `simulation.py` on a virtual clock.
"""

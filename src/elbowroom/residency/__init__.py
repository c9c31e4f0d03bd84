"""Events in, actions out: the only code that decides at run time, as a pure machine with two drivers.

The runtime feeds it what really happens and carries its actions out on streams; the simulator feeds it a trace on a
virtual clock. So a forecast and a run cannot drift apart.
"""

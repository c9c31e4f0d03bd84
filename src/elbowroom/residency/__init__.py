"""Runtime decisions as a pure state machine: events in, actions out.

It has two drivers. The runtime feeds it real events and carries out its actions on streams; the simulator feeds it a
trace on a virtual clock. Both run the same code, so a forecast cannot diverge from a run.
"""

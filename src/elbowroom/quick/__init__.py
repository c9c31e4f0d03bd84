"""What comes most often in a running step, in machine code: the flat ways of the runtime, on the runtime's own objects.

Each class of the library lies under one of `runtime` and does what a method of it does, for the usual case; the rest is
left to that method. So everything works without it, slower.
"""

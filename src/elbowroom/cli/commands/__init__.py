"""The commands. Each module here is one, and puts itself into the program with `register(app)`.

No module imports torch before its command runs, so that `elbowroom --help` is instant.
"""

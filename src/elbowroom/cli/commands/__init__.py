"""Commands, one per module, which adds itself to the program with `register(app)`.

No module imports torch before its command runs, so that `elbowroom --help` is instant.
"""

"""The observer of ops: a library of its own for as long as no step is observed by it."""

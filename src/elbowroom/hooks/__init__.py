"""A running step -> events: identities of storages, saved-tensor hooks, recorded ops. Always detachable."""

"""Several processes that train one model: what they agree on, and what they learn of each other's end."""

"""The nouns: frozen values that pass between the rooms, each of which can be a file. Nothing here imports torch."""

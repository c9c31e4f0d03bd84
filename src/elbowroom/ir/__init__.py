"""Intermediate representation: frozen values that packages exchange and files store. Does not import torch."""

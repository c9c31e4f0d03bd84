"""Command-line interface: one command a module, with tables for people and `--json` for programs."""

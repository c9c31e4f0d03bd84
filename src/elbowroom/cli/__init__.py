"""The command line: the verbs, with tables for people and `--json` for programs."""

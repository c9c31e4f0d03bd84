"""Rules: one file for each group of ops, with a dict `RULES` of SliceRules by overload name."""

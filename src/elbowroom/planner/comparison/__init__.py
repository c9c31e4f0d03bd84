"""Several strategies, budgets or batch sizes side by side."""

"""Plans for a machine: estimates of candidate settings, the search for the best settings, and
budgets."""

"""Plan runs for a machine. A plan estimates candidate settings, searches for the best settings, and
suggests a model for a budget."""

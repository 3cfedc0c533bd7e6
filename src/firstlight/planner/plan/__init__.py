"""Plan runs for a machine: estimate candidate settings, search for the best settings, and suggest a
model for a budget."""

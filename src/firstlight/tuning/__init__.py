"""Search of a recipe's keys: short training runs, each with other values."""

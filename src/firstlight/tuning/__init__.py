"""Search over a recipe's keys by short training runs with different values."""

"""Search over keys of a recipe, using short training runs with different values."""

"""Search for the best values of recipe keys, using short training runs with different values."""

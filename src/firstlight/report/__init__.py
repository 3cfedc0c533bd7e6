"""Reports of runs and comparisons of runs: PNG and HTML."""

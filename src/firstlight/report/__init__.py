"""Create reports of runs and comparisons of several runs, as HTML pages and PNG pictures."""

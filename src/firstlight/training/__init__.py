"""Training: the recipe, the step, the loop, metrics and the report."""

"""Benchmarks: effects of choices, measured on the machine at hand."""

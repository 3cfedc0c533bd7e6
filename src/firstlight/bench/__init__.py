"""Benchmarks: what a choice buys on the machine at hand."""

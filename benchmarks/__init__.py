"""Benchmarks of firstlight: comparisons with other programs, and measurements behind its defaults
and predictions.

    python -m benchmarks            lists them
    python -m benchmarks NAME ...   runs one

This package exists only in a source checkout; it is not installed.
"""

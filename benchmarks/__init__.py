"""Benchmarks of firstlight: beside other programs, and what its choices and predictions rest on.

    python -m benchmarks            lists them
    python -m benchmarks NAME ...   runs one

This package is in a checkout only, and not part of the installed one.
"""

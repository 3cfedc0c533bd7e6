"""Detect the device, look up GPUs in a table, and set environment variables for torch's thread
library and allocator.
"""

"""The machine: device detection, the GPU table, and environment variables for torch's thread
library and allocator.
"""

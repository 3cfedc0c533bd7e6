"""Facts about the machine and settings for it: device detection, the GPU table, and environment
variables for torch's thread library and allocator.
"""

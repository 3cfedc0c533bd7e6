"""The machine: device detection, the GPU table, and the environment of thread library and
allocator."""

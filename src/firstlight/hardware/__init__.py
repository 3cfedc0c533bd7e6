"""The machine: device, GPU table, environment of the thread library and allocator."""

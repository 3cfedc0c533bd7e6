"""Write and read the checkpoints of runs. Checkpoints are written atomically and verified before
use. Their tensors are stored either in a single file or in one file of shards per process.
"""

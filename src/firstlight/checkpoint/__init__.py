"""Write and read the checkpoints of runs. They are written atomically, verified before use, and
stored either as shards or in a single file.
"""

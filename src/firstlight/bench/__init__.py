"""`firstlight bench`: measures the effects of settings on the user's machine.

Published figures, such as those for GPUs, are measured by the separate package `benchmarks/` next
to `src/`.
"""

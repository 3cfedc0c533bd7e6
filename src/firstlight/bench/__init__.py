"""The benchmarks of `firstlight bench`, which measure the effects of settings on this machine.

Published figures, such as GPU results, are measured with the separate package `benchmarks/` next to
`src/`.
"""

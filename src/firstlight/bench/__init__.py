"""The benchmarks of `firstlight bench`: measurements of the effects of settings on this machine.

Published figures, such as GPU results, are measured by the separate package `benchmarks/` next to
`src/`.
"""

"""`firstlight bench`: measure the effects of settings on the user's machine.

Published figures, such as GPU results, are measured by the separate package `benchmarks/` next to
`src/`.
"""

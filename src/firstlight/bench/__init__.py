"""`firstlight bench`: effects of choices, measured on the user's machine.

Figures of the project itself, such as those of a GPU, are measured by `benchmarks/` beside `src/`.
"""

"""Figures of firstlight on one GPU: `quick` measures in one process what speed work needs, `bench`
measures the published rows, each in a fresh process, and writes their pages."""

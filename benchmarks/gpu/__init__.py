"""Measurements of firstlight on one GPU: `quick` takes the measurements needed for optimisation
work in one process; `bench` measures the published rows, each in a fresh process, and writes their
pages."""

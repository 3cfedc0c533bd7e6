"""Tests on a GPU: `make test-gpu`, or with DEVICE=cpu the subset that a CPU supports."""

"""What a GPU does: `make test-gpu`, or with DEVICE=cpu what a CPU can do of it."""

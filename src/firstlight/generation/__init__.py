"""Generation: sampling and the engine that runs a model token by token."""

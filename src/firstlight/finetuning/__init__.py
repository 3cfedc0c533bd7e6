"""Fine-tunes a model on texts or conversations with one command: it chooses method and settings for
a budget of time, prepares the data, and runs the training."""

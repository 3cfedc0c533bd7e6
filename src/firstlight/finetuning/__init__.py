"""Fine-tune a model on texts or conversations with one command: choose a method and settings for a
time budget, prepare the data, and train."""

"""Fine-tune a model on text or conversations with one command, which chooses a method and settings
for a time budget, prepares the data and trains the model.
"""

"""Fine-tune a model on text or conversations with a single command. The command chooses a method
and settings for a given time budget, prepares the data and trains the model.
"""

"""Train a model on text or conversations with one command.

`run.train_texts` implements the command. It either trains a new model (`new_model`, with settings
from `choices`) or fine-tunes an existing model (`firstlight.finetuning`). Training and fine-tuning
share these modules: `request` (inputs, length and user settings), `scan` (analysis of the inputs),
`plan` (settings and the printed plan), `preparation` (token shards), `machine` (memory, speed and
the training itself) and `run_folder`.
"""

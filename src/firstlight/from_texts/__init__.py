"""From texts to a model in one command.

`run.train_texts` is the command's function. Its work is a new model (`new_model`, with settings
from `choices`) or fine-tuning (`firstlight.finetuning`). Both share `request` (inputs, length and
given settings), `scan` (the contents of the inputs), `plan` (settings and the printed plan),
`preparation` (shards), `machine` (memory, speed, and the training itself) and `run_folder`.
"""

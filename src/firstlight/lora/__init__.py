"""Low-rank adapters (LoRA), which are small trainable matrices that are added to a frozen model.
Adapters are stored in PEFT's file format."""

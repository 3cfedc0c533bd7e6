"""Low-rank adapters (LoRA): small trainable matrices that are added to a frozen model and stored in
PEFT's file format."""

"""Low-rank adapters (LoRA): small trainable matrices added to a frozen model. Adapters are stored
in PEFT's file format."""

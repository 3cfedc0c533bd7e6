"""Low-rank adapters: small trainable matrices added to a frozen model, in PEFT's file format."""

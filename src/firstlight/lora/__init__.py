"""Low-rank adapters: small trainable matrices beside a frozen model, in PEFT's file format."""

"""Conversion: models of other programs in, models for other programs out."""

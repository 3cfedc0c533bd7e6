"""Conversion of models from and to the formats of other programs."""

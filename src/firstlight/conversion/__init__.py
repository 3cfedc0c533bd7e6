"""Convert models to and from the formats of other programs."""

"""The files in which a run records what happens: their names, their writer and their readers."""

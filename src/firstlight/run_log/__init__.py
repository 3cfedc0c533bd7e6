"""Log files of a run: their names, writer and readers."""

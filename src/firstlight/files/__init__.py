"""Files and folders that appear whole or not at all, and the one place that writes to the disk."""

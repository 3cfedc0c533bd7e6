"""Write files and folders atomically; only this package writes to the disk."""

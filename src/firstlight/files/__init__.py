"""Write files and folders atomically. All other packages write to the disk through this package."""

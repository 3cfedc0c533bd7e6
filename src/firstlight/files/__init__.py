"""Write files and folders atomically. Other packages write to the disk only through this one."""

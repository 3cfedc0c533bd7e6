"""Atomic writing of files and folders, and the only module that writes to the disk."""

"""Write and read the log files of a run."""

"""The command line: one small file a verb; torch is imported by the verbs that need it."""

"""The command line: a module for each verb or group of verbs. torch is imported inside functions
of the verbs that need it, because the import takes seconds."""

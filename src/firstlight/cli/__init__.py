"""The command line: a module for each verb or group of verbs. torch is imported inside functions
of the verbs that need it, because the import takes seconds."""

from firstlight.hardware.environment import require_fork

# Here, because the modules of the verbs import what Windows does not have.
try:
    require_fork()
except ImportError as error:
    raise SystemExit(f"firstlight: error: {error}") from None

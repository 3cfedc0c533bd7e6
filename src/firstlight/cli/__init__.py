"""The command line, with one module per command or group of related commands.

Modules import torch inside the functions that need it, because the import takes several seconds.
"""

from firstlight.hardware.environment import require_fork

# Check for `os.fork` first, because the command modules import modules that do not exist on
# Windows.
try:
    require_fork()
except ImportError as error:
    raise SystemExit(f"firstlight: error: {error}") from None

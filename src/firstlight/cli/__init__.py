"""The command line interface. Each module defines a command or a group of related commands.

The modules import torch inside functions that need it, because importing torch takes several
seconds.
"""

from firstlight.hardware.environment import require_fork

# Check for `os.fork` before the commands are imported, because they import modules that do not
# exist on Windows.
try:
    require_fork()
except ImportError as error:
    raise SystemExit(f"firstlight: error: {error}") from None

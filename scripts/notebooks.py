"""Run examples/colab.ipynb and examples/kaggle.ipynb on this machine, and store their outputs.

    python scripts/notebooks.py

The cells are the same as on a T4. The only changes, which are not stored, are a short budget and
local folders instead of Google Drive's and Kaggle's. Requires the extra `dev`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: Folders of the two services.
FOLDERS = ("/content", "/kaggle/working", "/kaggle/input")
#: Changes that shorten a run, by notebook.
SHORTER = {
    "colab.ipynb": {
        'TEXTS = "texts"\n': 'TEXTS = "stdlib"\n',
        'BUDGET = "8h"': 'BUDGET = "4m"',
        "SESSION_MINUTES = 660": "SESSION_MINUTES = 2",
    },
    "kaggle.ipynb": {
        'BUDGET = "8h"': 'BUDGET = "4m"',
        "SESSION_MINUTES = 480": "SESSION_MINUTES = 2",
    },
}
#: Replaces Colab's own package, and records calls of its functions.
_COLAB = """
class _Part:
    def __getattr__(self, name):
        return lambda *arguments: print(f"{name}{arguments}")

drive, files = _Part(), _Part()
"""


def executed(name: str, folder: Path, changes: Mapping[str, str]) -> Any:
    """Execute an example in a kernel of this Python, and return it with its original cells.

    Args:
        name: file name of the notebook in examples/.
        folder: an empty folder for the files of the run and of the kernel.
        changes: texts of cells, each of which occurs once, and the code to execute instead.

    Returns:
        The notebook, an `nbformat.NotebookNode`.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    written = [cell.source for cell in notebook.cells]
    source = "\0".join(written)
    for text, other in changes.items():
        assert source.count(text) == 1, text
        source = source.replace(text, other)
    for place in FOLDERS:
        (folder / place.strip("/")).mkdir(parents=True, exist_ok=True)
        source = source.replace(f'"{place}', f'"{folder}{place}')
    for cell, text in zip(notebook.cells, source.split("\0"), strict=True):
        cell.source = text
    colab = folder / "stand-ins" / "google" / "colab.py"
    colab.parent.mkdir(parents=True)
    colab.write_text(_COLAB)
    kernel = folder / "jupyter" / "kernels" / "here"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "here"}))
    paths = [str(colab.parents[1]), *sys.path]
    environment = {
        "JUPYTER_DATA_DIR": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        # The installed packages are sufficient.
        "PIP_NO_INDEX": "1",
    }
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        nbclient.NotebookClient(
            notebook,
            kernel_name="here",
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    for cell, text in zip(notebook.cells, written, strict=True):
        cell.source = text
    return notebook


def main() -> None:
    """Store the outputs of both notebooks."""
    import nbformat

    for name, changes in SHORTER.items():
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(name, Path(folder), changes)
            for cell in notebook.cells:
                # Without pictures of reports, which take ten times as much space as everything
                # else.
                outputs = cell.get("outputs", [])
                outputs[:] = [one for one in outputs if "image/png" not in one.get("data", {})]
            text = nbformat.writes(notebook).replace(folder, "")
        (EXAMPLES / name).write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

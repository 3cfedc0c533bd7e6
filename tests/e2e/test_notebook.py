"""examples/quickstart.ipynb, with fewer steps, in a kernel of its own."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

_NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
#: What makes it quick, and is no part of what is tested.
_SHORTER = {'("asyncio", "email", "json")': '("json",)', 'budget="3m"': 'steps=8, size="tiny"'}


# jupyter_client's own warnings about the zmq library and about its folders.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_quickstart_shows_progress_and_report_inline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside other tests, threads that wait for each other would take minutes.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for name in ("GOMP_SPINCOUNT", "FIRSTLIGHT_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTER_DATA_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(_NOTEBOOK, as_version=4)
    source = "\0".join(cell.source for cell in notebook.cells)
    for written, shorter in _SHORTER.items():
        assert source.count(written) == 1
        source = source.replace(written, shorter)
    for cell, text in zip(notebook.cells, source.split("\0"), strict=True):
        cell.source = text
    spin = nbformat.v4.new_code_cell("import os\nprint(os.environ['GOMP_SPINCOUNT'])")
    notebook.cells.insert(2, spin)  # after the import
    kernel = tmp_path / "JUPYTER_DATA_DIR" / "kernels" / "this"
    kernel.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernel / "kernel.json").write_text(
        f'{{"argv": {command}, "display_name": "this", "language": "python"}}'
    )
    nbclient.NotebookClient(
        notebook, kernel_name="this", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    training = next(cell for cell in notebook.cells if "firstlight.train_texts(" in cell.source)
    _require_inline(training.outputs)
    assert spin.outputs[0]["text"] == "5000\n"  # as of a command
    # The output is one that is updated, and nothing is red.
    everything = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [one for one in everything if one.get("name") == "stderr"] == []
    assert "bits per byte of held-out text" in "".join(one.get("text", "") for one in everything)


def _require_inline(outputs: list[Any]) -> None:
    shown = [one["data"] for one in outputs if one["output_type"] == "display_data"]
    (progress,) = [data for data in shown if "text/html" in data]
    (report,) = [data for data in shown if "image/png" in data]
    assert shown[-1] == report
    assert any(data["text/plain"].startswith("training took ") for data in shown)
    lines = progress["text/plain"].splitlines()
    assert [line for line in lines if line.startswith("step 8/8  100%")]
    assert [line for line in lines if line.startswith("step 8: val/loss ")]
    assert "<polyline points=" in progress["text/html"]
    assert base64.b64decode(report["image/png"]).startswith(b"\x89PNG")

"""The notebooks of examples/ with fewer steps, each in a separate kernel."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

_SCRIPT = Path(__file__).parents[2] / "scripts" / "notebooks.py"
#: What makes it quick, and the spin count of the kernel's threads.
_QUICKSTART = {
    '("asyncio", "email", "json")': '("json",)',
    'budget="3m"': 'steps=8, size="tiny"',
    "import firstlight\n": "import firstlight, os\nprint(os.environ['GOMP_SPINCOUNT'])\n",
}
#: Two steps on a small file, each in a session that ends at once; the last one may only evaluate.
_TWO_STEPS = {
    "budget=BUDGET": 'steps=2, size="tiny"',
    "\0run = train()": "\0while run.training.stopped_by:\n    run = train()",
}
_COLAB = {
    **_TWO_STEPS,
    'TEXTS = "texts"\n': "TEXTS = os.__file__\n",
    "SESSION_MINUTES = 660": "SESSION_MINUTES = 1e-6",
}
_KAGGLE = {
    **_TWO_STEPS,
    'TEXTS = "stdlib"': "TEXTS = os.__file__",
    "SESSION_MINUTES = 480": "SESSION_MINUTES = 1e-6",
}

Execute = Callable[[str, Path, Mapping[str, str]], Any]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Execute:
    """The function of `scripts/notebooks.py`."""
    # Beside other tests, threads that wait for each other would take minutes.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    for name in ("GOMP_SPINCOUNT", "FIRSTLIGHT_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    specification = importlib.util.spec_from_file_location("notebooks", _SCRIPT)
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    function: Execute = module.executed
    return function


def _texts(notebook: Any) -> str:
    """All texts that the cells print or display."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [one for one in outputs if one.get("name") == "stderr"] == []  # nothing is red
    return "\n".join(
        one["text"] if one["output_type"] == "stream" else one["data"].get("text/plain", "")
        for one in outputs
    )


# jupyter_client's own warnings about the zmq library and about its folders.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_notebook_quickstart_shows_progress_and_report_inline(
    executed: Execute, tmp_path: Path
) -> None:
    notebook = executed("quickstart.ipynb", tmp_path, _QUICKSTART)
    training = next(cell for cell in notebook.cells if "firstlight.train_texts(" in cell.source)
    _require_inline(training.outputs)
    texts = _texts(notebook)
    assert texts.startswith("5000\n")  # as of a command
    assert "bits per byte of held-out text" in texts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "changes", "folder"),
    [
        ("colab.ipynb", _COLAB, "content/drive/MyDrive/firstlight"),
        ("kaggle.ipynb", _KAGGLE, "kaggle/working"),
    ],
)
def test_notebook_session_stops_in_time_resumes_and_exports(
    executed: Execute, tmp_path: Path, name: str, changes: Mapping[str, str], folder: str
) -> None:
    notebook = executed(name, tmp_path, changes)
    texts = _texts(notebook)
    first, _, later = texts.partition("resuming runs/mine\n")
    assert "step 2/2" not in first
    assert "step 2/2  100%" in later
    assert "bits per byte, gzip" in texts
    (model,) = (tmp_path / folder / "gguf").iterdir()
    assert model.suffix == ".gguf"
    assert f"gguf/{model.name}" in texts.partition("bits per byte, gzip")[2]
    # The cells are stored as they were.
    assert "SESSION_MINUTES = 1e-6" not in "".join(cell.source for cell in notebook.cells)


def test_notebook_on_kaggle_copies_run_of_earlier_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = json.loads((_SCRIPT.parents[1] / "examples" / "kaggle.ipynb").read_text("utf-8"))
    (cell,) = [one for one in cells["cells"] if "copytree" in "".join(one["source"])]
    earlier = tmp_path / "input" / "notebooks" / "me" / "runs" / "mine"
    earlier.mkdir(parents=True)
    (earlier / "recipe.yaml").touch()
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path)
    source = "".join(cell["source"]).replace("/kaggle/", f"{tmp_path}/")
    exec(source, {})  # noqa: S102 (the notebook's own cell)
    assert (tmp_path / "working" / "runs" / "mine" / "recipe.yaml").exists()


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

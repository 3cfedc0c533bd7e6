"""What a release consists of: version, wheel and sdist, the page on PyPI, and the workflow."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import firstlight

_ROOT = Path(__file__).parents[2]
_PROJECT = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
_WORKFLOW = _ROOT / ".github" / "workflows" / "release.yml"
_ADDRESS = "https://host.example/someone/firstlight"
#: In an sdist of a release, the two files have been changed.
_in_checkout = pytest.mark.skipif("\n[project.urls]" in _PROJECT, reason="prepared for a release")
_BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


@pytest.fixture(scope="module")
def release() -> Any:
    """The module `scripts/release.py`."""
    path = _ROOT / "scripts" / "release.py"
    specification = importlib.util.spec_from_file_location("release", path)
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of a copy of this checkout."""
    pytest.importorskip("setuptools", minversion="77")
    ignored = (_ROOT / ".gitignore").read_text(encoding="utf-8").split()

    def left_out(folder: str, names: list[str]) -> set[str]:
        is_top = Path(folder) == _ROOT
        patterns = [one.strip("/") for one in ignored if is_top or not one.startswith("/")]
        return {name for one in (*patterns, ".git") for name in fnmatch.filter(names, one)}

    copy = tmp_path_factory.mktemp("release") / "copy"
    shutil.copytree(_ROOT, copy, ignore=left_out)
    subprocess.run([sys.executable, "-c", _BUILD], cwd=copy, check=True, capture_output=True)
    return copy / "dist"


def _files(folder: Path) -> set[str]:
    """The files of a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_version_is_equal_in_all_files() -> None:
    citation = yaml.safe_load((_ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    version = tomllib.loads(_PROJECT)["project"]["version"]
    assert version == firstlight.__version__ == citation["version"]


def test_wheel_contains_exactly_the_package_files(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    source = {f"firstlight/{name}" for name in _files(_ROOT / "src" / "firstlight")}
    assert packaged == {name for name in source if "__pycache__" not in name}
    assert any(name.endswith("few_rows.cpp") for name in packaged)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_contains_every_repository_file(built: Path) -> None:
    if not (_ROOT / ".git").exists():
        pytest.skip("not a checkout of the repository")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=_ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")[:-1]
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "tests/project/test_makefile.py" in tracked
    assert set(tracked) - names == set()


def test_release_tag_of_other_version_exits(release: Any) -> None:
    project = '[project]\nversion = "1.2.0"'
    release.require_tag_of_version("v1.2.0", project)
    with pytest.raises(SystemExit, match=r"tag v1\.2: .* version 1\.2\.0, .* must be v1\.2\.0"):
        release.require_tag_of_version("v1.2", project)


@pytest.mark.parametrize(
    ("link", "absolute"),
    [
        ("[a](docs/gpu.md#speed)", f"[a]({_ADDRESS}/blob/v1/docs/gpu.md#speed)"),
        ("![a](docs/a.png)", f"![a]({_ADDRESS}/raw/v1/docs/a.png)"),
        ('<img src="docs/a.svg">', f'<img src="{_ADDRESS}/raw/v1/docs/a.svg">'),
        ('[a](docs/a.md "why")', f'[a]({_ADDRESS}/blob/v1/docs/a.md "why")'),
        ("[a](https://a.example/b) [b](#b)", "[a](https://a.example/b) [b](#b)"),
    ],
)
def test_release_relative_link_becomes_address_of_tag(
    release: Any, link: str, absolute: str
) -> None:
    assert release.with_absolute_links(link, _ADDRESS, "v1") == absolute


@_in_checkout
def test_release_readme_has_no_relative_links(release: Any) -> None:
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    page = release.with_absolute_links(readme, _ADDRESS, "v1")
    links = re.findall(r'\]\(([^)\s]+)|(?:src|href)="([^"]+)"', page)
    assert [link for pair in links for link in pair if link and not link.startswith("http")] == []
    named = re.findall(rf"{_ADDRESS}/\w+/v1/([^)\s\"#]+)", page)
    assert named
    assert [name for name in named if not (_ROOT / name).exists()] == []


@_in_checkout
def test_release_project_has_repository_urls(release: Any) -> None:
    project = tomllib.loads(release.with_addresses(_PROJECT, _ADDRESS, "v1"))["project"]
    assert "urls" not in tomllib.loads(_PROJECT)["project"]
    assert set(project["urls"]) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert project["urls"]["Repository"] == _ADDRESS
    assert project["urls"]["Changelog"] == f"{_ADDRESS}/blob/v1/CHANGELOG.md"


def test_release_workflow_publishes_tested_files_without_secrets() -> None:
    text = _WORKFLOW.read_text(encoding="utf-8")
    # YAML 1.1 reads the key "on" as true.
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert "secrets." not in text
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]["name"] == "pypi"
    assert publish["needs"] == [name for name in jobs if name != "publish"]
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "with" not in publish["steps"][-1]
    # What is tested and published is what was built, from a checkout that was prepared.
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    prepare = 'python scripts/release.py "$GITHUB_REF_NAME" "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"'
    assert commands.index(prepare) < commands.index("python -m build")
    assert commands[-1] == "python -m twine check --strict dist/*"
    assert not any("checkout" in step.get("uses", "") for step in jobs["test-wheel"]["steps"])

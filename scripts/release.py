"""Prepare a checkout for a release: check the tag, and make the links of README.md absolute.

    python scripts/release.py v0.1.0 https://github.com/OWNER/NAME

`.github/workflows/release.yml` runs it before the build. It changes README.md and pyproject.toml
in place. PyPI shows README.md without the other files of the repository, so its relative links and
pictures are replaced by addresses of the tag. pyproject.toml gets the addresses of the repository,
which are not known in a checkout.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
#: `](docs/gpu.md)` and `src="docs/images/demo.svg"`: not addresses, not anchors of the page.
_RELATIVE = re.compile(r'(\]\(|\b(?:src|href)=")(?![a-z]+:|#|/)([^)\s"]+)')
_PICTURES = (".png", ".svg", ".gif", ".jpg")


def require_tag_of_version(tag: str, project: str) -> None:
    """Reject a tag that does not match the version of the package.

    Args:
        tag: name of the tag.
        project: text of pyproject.toml.

    Raises:
        SystemExit: the tag is not "v" and the version.
    """
    version = tomllib.loads(project)["project"]["version"]
    if tag != f"v{version}":
        sys.exit(f"tag {tag}: pyproject.toml has version {version}, so the tag must be v{version}")


def with_absolute_links(page: str, address: str, tag: str) -> str:
    """Return a Markdown page with addresses of files at a tag instead of relative links.

    Args:
        page: text of a page at the top of the repository.
        address: address of the repository.
        tag: name of the tag.
    """

    def absolute(link: re.Match[str]) -> str:
        # "blob" is a page about a file, "raw" is the file itself.
        kind = "raw" if link[2].endswith(_PICTURES) else "blob"
        return f"{link[1]}{address}/{kind}/{tag}/{link[2]}"

    return _RELATIVE.sub(absolute, page)


def with_addresses(project: str, address: str, tag: str) -> str:
    """Return the text of pyproject.toml with the addresses that PyPI shows next to the page.

    Args:
        project: text of pyproject.toml, without `[project.urls]`.
        address: address of the repository.
        tag: name of the tag.
    """
    return f"""{project}
[project.urls]
Repository = "{address}"
Documentation = "{address}/blob/{tag}/docs/index.md"
Changelog = "{address}/blob/{tag}/CHANGELOG.md"
Issues = "{address}/issues"
"""


def main() -> None:
    """Check the tag, and change the two files."""
    parser = argparse.ArgumentParser(description="Prepare a checkout for a release.")
    parser.add_argument("tag", help="the tag, such as v0.1.0")
    parser.add_argument("address", help="address of the repository")
    options = parser.parse_args()
    readme, pyproject = _ROOT / "README.md", _ROOT / "pyproject.toml"
    page, project = readme.read_text(encoding="utf-8"), pyproject.read_text(encoding="utf-8")
    require_tag_of_version(options.tag, project)
    page = with_absolute_links(page, options.address, options.tag)
    readme.write_text(page, encoding="utf-8")
    project = with_addresses(project, options.address, options.tag)
    pyproject.write_text(project, encoding="utf-8")


if __name__ == "__main__":
    main()

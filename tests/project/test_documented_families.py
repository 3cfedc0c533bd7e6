"""docs/model-families.md: every block is a model section, and has the parameters it names; every
family has its figures beside transformers."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from firstlight.models import FAMILIES
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.recipe import load_recipe

_PAGE = (Path(__file__).parents[2] / "docs" / "model-families.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"((?:^    .*\n)+)", _PAGE, re.MULTILINE)


def test_every_family_has_its_block() -> None:
    assert len(_BLOCKS) == 27
    assert {yaml.safe_load(block)["model_type"] for block in _BLOCKS} == set(FAMILIES)


def test_every_family_has_its_figures_beside_transformers() -> None:
    table = _PAGE.partition("## Agreement with transformers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| (\S+) \| (\S+) \|$", table, re.M)
    assert sorted(family for family, _, _ in rows) == sorted(FAMILIES)
    assert all(float(figure) < 1e-4 for _, *figures in rows for figure in figures)


def test_every_family_is_a_row_of_the_readme() -> None:
    table = _PAGE.partition("## Agreement with transformers")[2].partition("\n## ")[0]
    expected = []
    for name, family, *figures in re.findall(
        r"^\| ([^|]+) \| `(\w+)` \| (\S+) \| (\S+) \|$", table, re.M
    ):
        config, spec = FAMILIES[family].config, FAMILIES[family].spec
        parallel = bool(config.tensor_parallel_sizes) and not spec.indivisible
        does = ", ".join("yes" if one else "refused" for one in (parallel, config.has_pipeline))
        gguf = f"`{spec.gguf.architecture}`" if spec.gguf.architecture else "refused"
        cells = name, f"`{spec.architecture}`", *figures, gguf, does
        expected.append(f"| {' | '.join(cells)} |")
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = readme.partition("## Families of models")[2].partition("\n## ")[0]
    assert re.findall(r"^\|.+\|$", found, re.M)[2:] == expected
    assert len(expected) == len(FAMILIES)


@pytest.mark.parametrize("block", _BLOCKS, ids=lambda block: str(block).split()[1].strip(":"))
def test_a_block_is_a_model_of_the_size_it_says(block: str, tmp_path: Path) -> None:
    said = re.match(r"\s*# [\w.-]+: ([\d,]+) parameters\n", block)
    assert said is not None
    text = "data: {dir: d}\nmodel:\n" + textwrap.indent(textwrap.dedent(block), "  ")
    (tmp_path / "recipe.yaml").write_text(text)
    config = load_recipe(tmp_path / "recipe.yaml").model
    assert config is not None
    assert count_parameters(meta_model(config)).total == int(said[1].replace(",", ""))

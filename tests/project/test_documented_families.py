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


def test_families_page_has_block_for_every_family() -> None:
    assert len(_BLOCKS) == 28
    assert {yaml.safe_load(block)["model_type"] for block in _BLOCKS} == set(FAMILIES)


def test_families_table_has_sizes_and_features_of_every_family() -> None:
    table = _PAGE.partition("## Agreement with transformers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| (\d.+) \|$", table, re.M)
    assert sorted(family for family, _ in rows) == sorted(FAMILIES)
    for family, cells in rows:
        logits, gradients, gguf, parallel = cells.split(" | ")
        assert float(logits) < 1e-5, family
        assert float(gradients) < 1e-4, family
        config, spec = FAMILIES[family].config, FAMILIES[family].spec
        assert gguf == (f"`{spec.gguf.architecture}`" if spec.gguf.architecture else "no"), family
        has_tensor = bool(config.tensor_parallel_sizes) and not spec.indivisible
        expected = {(True, True): "both", (False, True): "pipeline", (False, False): "none"}
        assert parallel == expected[has_tensor, config.has_pipeline], family


@pytest.mark.parametrize("block", _BLOCKS, ids=lambda block: str(block).split()[1].strip(":"))
def test_families_page_blocks_have_stated_size(block: str, tmp_path: Path) -> None:
    said = re.match(r"\s*# [\w.-]+: ([\d,]+) parameters\n", block)
    assert said is not None
    text = "data: {dir: d}\nmodel:\n" + textwrap.indent(textwrap.dedent(block), "  ")
    (tmp_path / "recipe.yaml").write_text(text)
    config = load_recipe(tmp_path / "recipe.yaml").model
    assert config is not None
    assert count_parameters(meta_model(config)).total == int(said[1].replace(",", ""))

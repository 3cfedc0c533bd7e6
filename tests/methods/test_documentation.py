"""docs/methods.md has a row for every method of a recipe, and names existing tests."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from table import BEGIN, END, PAGE, with_table

from firstlight.lora.layers import LoraConfig
from firstlight.methods import EfficiencyConfig
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.schedule import ScheduleConfig
from firstlight.recipe import BatchConfig, DataConfig

#: Keys that are not methods, or that only work together as one method.
_OTHERS = {
    "data.dir",
    "data.mix",
    "data.seq_len",
    "data.verify",
    *(f"lora.{key}" for key in ("alpha", "dropout", "targets", "use_rslora")),
    *(f"lora.{key}" for key in ("rank_pattern", "alpha_pattern", "ensure_weight_tying")),
    *("lora.modules_to_save", "lora.trainable_token_indices"),
}
#: Keys of conversations and of kept text, which have a separate page.
_OF_CHATS = {
    f"data.{key}"
    for key in (
        *("kind", "files", "val_files", "val_fraction", "format", "template", "tokenizer"),
        *("train_on", "on_bad", "long", "keep", "replay"),
    )
}
#: Keys of schedules, also on a separate page.
_OF_SCHEDULES = {"batch.ramp_start_tokens", "batch.ramp_steps"}
#: Keys of learning settings, also on a separate page.
_OF_LEARNING = {"data.row_alignment"}
_COLUMNS = 5


def _rows() -> dict[str, list[str]]:
    """Return the cells of each row of the page's method tables, keyed by recipe key."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        match = re.match(r"\| `([a-z0-9_.]+(?:: [\w-]+)?)` \|", line)
        if match and line.count("|") == _COLUMNS + 1:
            assert match[1] not in found, f"{match[1]} has two rows"
            found[match[1]] = [cell.strip() for cell in line.strip("|").split("|")]
    return found


def _methods() -> Iterator[str]:
    """Yield `section.key`, or `section.key: value` for each value if the values have names."""
    sections: dict[str, type[BaseModel]] = {
        "batch": BatchConfig,
        "data": DataConfig,
        "efficiency": EfficiencyConfig,
        "lora": LoraConfig,
    }
    for section, kind in sections.items():
        for key, field in kind.model_fields.items():
            if f"{section}.{key}" not in _OTHERS | _OF_CHATS | _OF_SCHEDULES | _OF_LEARNING:
                yield from _named(f"{section}.{key}", field.annotation)
    for key in ("name", "implementation", "eight_bit_library", "embeddings_in_32_bits"):
        yield from _named(f"optimizer.{key}", OptimizerConfig.model_fields[key].annotation)
    yield "batch.micro_batch_size: auto"
    yield "efficiency.compile: auto"


def _named(key: str, annotation: object) -> Iterator[str]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from (f"{key}: {value}" for value in typing.get_args(annotation))
    else:
        yield key


def test_methods_page_has_one_row_per_key_and_value() -> None:
    assert sorted(_rows()) == sorted(_methods())


def test_conversation_keys_are_on_their_page() -> None:
    page = PAGE.with_name("finetuning.md").read_text(encoding="utf-8")
    for name in _OF_CHATS:
        key = name.removeprefix("data.")
        assert f"`{key}`" in page or f"\n      {key}: " in page, name


def test_schedule_keys_are_on_their_page() -> None:
    page = PAGE.with_name("schedules.md").read_text(encoding="utf-8")
    for name in (*ScheduleConfig.model_fields, *_OF_SCHEDULES):
        assert re.search(rf"\b{name.removeprefix('batch.')}\b", page), name


def test_learning_keys_are_on_their_page() -> None:
    page = PAGE.with_name("learning.md").read_text(encoding="utf-8")
    for name in _OF_LEARNING:
        assert f"`{name}" in page, name


@pytest.mark.parametrize("key", _rows())
def test_methods_page_rows_give_reason_tolerance_and_test(key: str) -> None:
    _, why, nearness, _, proof = _rows()[key]
    assert len(why) > 10
    classes = "exact|rounding|approximate: .* nats, .*%|mathematics|plain|GPU only|depends on"
    assert re.match(classes, nearness)
    assert re.search(r"\b(alone|together|refused)\b|`test_\w+`", proof)
    assert "untested" not in nearness


def test_methods_page_names_existing_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    tests = Path(__file__).resolve().parents[1]
    defined = [
        (name, str(path.relative_to(tests.parent)))
        for path in tests.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    named = re.findall(r"`(test_\w+)`(?: \(`([\w/.]+)`\))?", page)
    assert len(named) > 10
    for name, place in named:
        places = [file for other, file in defined if other == name]
        assert any(file.startswith(place or "tests/methods/") for file in places), name


def test_methods_table_is_inserted_between_markers_only() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    changed = with_table(page, "one\ntwo")
    assert changed == f"before\n{BEGIN}\none\ntwo\n{END}\nafter\n"
    assert with_table(changed, "one\ntwo") == changed
    with pytest.raises(ValueError, match="not enough values"):
        with_table("no marks", "table")

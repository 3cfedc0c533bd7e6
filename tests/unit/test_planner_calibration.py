"""The store of this machine's times, and what is read from it for other operators."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import InputError
from firstlight.planner.memory.kernels import Layout, Operator, OperatorCount, bytes_of
from firstlight.planner.speed.calibration import (
    Calibration,
    Entry,
    Features,
    Reference,
    features_of,
    machine_fingerprint,
    store_path,
)
from firstlight.planner.speed.replay import can_replay, time_operator
from firstlight.planner.speed.store import (
    load_calibration,
    measure_operators,
    parse_store,
    save_calibration,
    standard_operators,
)

FP32 = torch.float32
FINGERPRINT = {"cpu": "a processor", "threads": 2}
NAMES = ("float32", "bfloat16", "stream")


def reference(seconds: float = 1.0) -> Reference:
    return Reference(dict.fromkeys(NAMES, seconds), dict.fromkeys(NAMES, 1e9), 1e-6)


def op(name: str, inputs: list[Layout], outputs: list[Layout], options: str = "") -> Operator:
    moved = sum(map(bytes_of, (*inputs, *outputs)))
    return Operator(f"aten.{name}", "forward", tuple(inputs), tuple(outputs), 0, moved, options)


def mm(m: int, k: int, n: int) -> Operator:
    return op("mm.default", [((m, k), FP32), ((k, n), FP32)], [((m, n), FP32)])


def add(size: int) -> Operator:
    return op("add.Tensor", [((size,), FP32)] * 2, [((size,), FP32)])


def filled(now: float = 1.0) -> Calibration:
    """Products at 1 GFLOP/s, sums at 1 GB/s, while the references take a second."""
    found = Calibration(FINGERPRINT, reference())
    for size in (64, 128, 256):
        features = features_of(mm(size, size, size))
        found.add(features, features.work / 1e9)
        features = features_of(add(size**2))
        found.add(features, features.work / 1e9)
    return Calibration(FINGERPRINT, reference(now), found.entries)


def test_a_store_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = save_calibration(filled(), tmp_path)
    found = load_calibration(tmp_path, reference(), FINGERPRINT)
    assert path == store_path(FINGERPRINT, tmp_path)
    assert found.entries == filled().entries
    assert found.notes == []


def test_without_a_store_there_is_nothing_and_no_note(tmp_path: Path) -> None:
    found = load_calibration(tmp_path, reference(), FINGERPRINT)
    assert (found.entries, found.notes) == ({}, [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"format": 1}',
        b'{"format": 1, "fingerprint": {"cpu": "a processor", "threads": 2}, "entries": [1]}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_store_is_ignored_with_a_note(tmp_path: Path, content: bytes) -> None:
    path = store_path(FINGERPRINT, tmp_path)
    path.write_bytes(content)
    found = load_calibration(tmp_path, reference(), FINGERPRINT)
    assert found.entries == {}
    assert "is ignored" in found.notes[0]
    assert str(path) in found.notes[0]


@pytest.mark.parametrize(
    "change",
    [
        {"ratios": []},
        {"ratios": [0.0]},
        {"ratios": ["fast"]},
        {"reference": "another"},
        {"sizes": None},
        {"work": -1},
    ],
)
def test_an_entry_that_makes_no_sense_damages_the_store(change: dict[str, Any]) -> None:
    values = json.loads(json.dumps(filled().to_json()))
    first = next(iter(values["entries"]))
    values["entries"][first] |= change
    with pytest.raises(InputError, match="damaged"):
        parse_store(values, FINGERPRINT)


def test_the_store_of_another_machine_or_format_is_ignored() -> None:
    values = filled().to_json()
    with pytest.raises(InputError, match="another machine"):
        parse_store(values, {**FINGERPRINT, "threads": 4})
    with pytest.raises(InputError, match="format"):
        parse_store({**values, "format": 99}, FINGERPRINT)


def test_each_machine_and_setting_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    short = machine_fingerprint()
    monkeypatch.setenv("GOMP_SPINCOUNT", "30000")
    assert store_path(short, tmp_path) != store_path(machine_fingerprint(), tmp_path)
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert store_path(short, tmp_path) == store_path(machine_fingerprint(), tmp_path)


def test_what_was_measured_is_given_back_exactly() -> None:
    found = filled().seconds(mm(128, 128, 128))
    assert found.source == "measured"
    assert found.seconds == pytest.approx(2 * 128**3 / 1e9)


def test_a_machine_that_is_slower_now_takes_longer() -> None:
    then, now = (filled(seconds).seconds(mm(128, 128, 128)).seconds for seconds in (1.0, 1.5))
    assert now == pytest.approx(1.5 * then)
    then, now = (filled(seconds).seconds(mm(100, 200, 150)).seconds for seconds in (1.0, 1.5))
    assert now == pytest.approx(1.5 * then)


def test_the_median_of_the_last_times_counts() -> None:
    found, features = Calibration(FINGERPRINT, reference()), features_of(add(1000))
    for seconds in (100.0, 100.0, *[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]):
        found.add(features, seconds)
    assert found.entries[features.key].ratios == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert found.seconds(add(1000)).seconds == 4.0


def test_between_sizes_of_one_rate_the_rate_is_that() -> None:
    found = filled().seconds(mm(100, 200, 150))
    assert found.source == "interpolated"
    assert found.seconds == pytest.approx(2 * 100 * 200 * 150 / 1e9)


def test_sizes_that_are_far_from_all_others_are_guessed() -> None:
    assert filled().seconds(mm(5000, 5000, 5000)).source == "guessed"


def test_beyond_all_sizes_of_a_stream_the_last_rate_holds() -> None:
    found = Calibration(FINGERPRINT, reference())
    for size, rate in ((10.0, 1.0), (20.0, 100.0)):
        found.add(Features(f"at {size}", "group", (size,), 1.0, "stream"), 1 / rate)
    large = found.estimate(Features("large", "group", (30.0,), 5.0, "stream"))
    assert large.seconds == pytest.approx(5 / 100)
    middle = found.estimate(Features("middle", "group", (15.0,), 5.0, "stream"))
    assert middle.seconds == pytest.approx(5 / 10)


def test_a_layout_without_times_goes_by_another() -> None:
    found = filled().seconds(mm(128, 128, 128), (False, True))
    assert found.seconds == pytest.approx(2 * 128**3 / 1e9)


def test_the_products_of_experts_are_timed_as_such_and_go_by_others_until_then() -> None:
    layouts = [((128, 64), FP32), ((4, 32, 64), FP32), ((4,), torch.int32)]
    experts = op("grouped_linear.default", layouts, [((128, 32), FP32)])
    flops = 2 * 128 * 64 * 32
    found = filled()
    assert found.seconds(experts).seconds == pytest.approx(flops / 1e9)
    found.add(features_of(experts), 10 * flops / 1e9)
    assert found.seconds(experts).seconds == pytest.approx(10 * flops / 1e9)
    assert found.seconds(mm(128, 128, 128)).seconds == pytest.approx(2 * 128**3 / 1e9)


def test_an_unknown_stream_goes_by_the_others() -> None:
    one = op("erfinv.default", [((128, 128), FP32)], [((128, 128), FP32)])
    assert filled().seconds(one).seconds == pytest.approx(2 * 4 * 128**2 / 1e9)


def test_what_was_timed_in_part_is_taken_in_proportion() -> None:
    found = Calibration(FINGERPRINT, reference())
    found.add(features_of(mm(500, 20, 30)), 3.0)
    whole = found.seconds(mm(1000, 20, 30))
    assert whole.source == "measured"
    assert whole.seconds == pytest.approx(6.0)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(1e-6, 1e3)), min_size=1, max_size=8),
    st.data(),
)
def test_interpolation_is_exact_at_known_points_and_between_known_rates(
    points: list[tuple[float, float]], data: st.DataObject
) -> None:
    known = {round(size, 1): rate for size, rate in points}
    found = Calibration(FINGERPRINT, reference())
    for size, rate in known.items():
        found.add(Features(f"at {size}", "group", (size,), 1e3, "stream"), 1e3 / rate)
    size, rate = data.draw(st.sampled_from(sorted(known.items())))
    same = found.estimate(Features("unseen", "group", (size,), 5e3, "stream"))
    assert same.seconds == pytest.approx(5e3 / rate, rel=1e-4)
    elsewhere = (data.draw(st.floats(0, 30)),)
    between = found.estimate(Features("unseen", "group", elsewhere, 1.0, "stream"))
    low, high = min(known.values()), max(known.values())
    assert 1 / high * (1 - 1e-9) <= between.seconds <= 1 / low * (1 + 1e-9)


def test_measuring_fills_the_store_with_what_costs_most() -> None:
    found = Calibration(FINGERPRINT, reference(1e-3))
    rare, often = add(4096), mm(64, 64, 64)
    view = op("view.default", [((8, 8), FP32)], [((64,), FP32)])
    counts = [OperatorCount(one, n) for one, n in ((rare, 1), (often, 100), (view, 9))]
    measure_operators(found, counts, seconds=0.0)
    assert found.entries == {}
    measure_operators(found, counts, seconds=5.0)
    assert features_of(often, (False, True)).key in found.entries
    assert all(entry.ratio > 0 for entry in found.entries.values())
    assert not any(key.startswith("view") for key in found.entries)


@pytest.mark.parametrize(
    "one",
    [
        mm(8, 16, 4),
        op("addmm.default", [((4,), FP32), ((8, 16), FP32), ((16, 4), FP32)], [((8, 4), FP32)]),
        op("add.Tensor", [((8, 4), FP32), ((4,), torch.bfloat16)], [((8, 4), FP32)]),
        op("mul.Tensor", [((8, 4), FP32)], [((8, 4), FP32)]),
        op("_to_copy.default", [((8, 4), FP32)], [((8, 4), torch.bfloat16)]),
        op("native_layer_norm.default", [((2, 8, 4), FP32), ((4,), FP32)], [((2, 8, 4), FP32)]),
        op("sum.dim_IntList", [((8, 4), FP32)], [((1, 4), FP32)]),
        op("mean.dim", [((2, 8, 4), FP32)], [((2, 8, 1), FP32)]),
        op("stack.default", [((2, 4), FP32)] * 3, [((2, 3, 4), FP32)]),
        op("cat.default", [((2, 4), FP32)] * 2, [((2, 8), FP32)]),
        op("embedding.default", [((9, 4), FP32), ((2, 3), torch.int64)], [((2, 3, 4), FP32)]),
        op(
            "embedding_dense_backward.default",
            [((2, 3, 4), FP32), ((2, 3), torch.int64)],
            [((9, 4), FP32)],
        ),
        op(
            "nll_loss_forward.default",
            [((6, 9), FP32), ((6,), torch.int64)],
            [((), FP32), ((), FP32)],
        ),
        op(
            "nll_loss_backward.default",
            [((), FP32), ((6, 9), FP32), ((6,), torch.int64), ((), FP32)],
            [((6, 9), FP32)],
        ),
        op("_log_softmax.default", [((6, 9), FP32)], [((6, 9), FP32)]),
        op("_log_softmax_backward_data.default", [((6, 9), FP32)] * 2, [((6, 9), FP32)]),
        op("_fused_adamw_.default", [((6,), FP32)] * 8 + [((), FP32)] * 2, []),
        op("_foreach_mul_.Scalar", [((6,), FP32)] * 3, []),
        op("linalg_vector_norm.default", [((6, 9), FP32)], [((), FP32)]),
        op(
            "_scaled_dot_product_flash_attention_for_cpu.default",
            [((1, 2, 8, 4), FP32)] * 3,
            [((1, 2, 8, 4), FP32), ((1, 2, 8), FP32)],
        ),
        op(
            "_scaled_dot_product_flash_attention_for_cpu_backward.default",
            [((1, 2, 8, 4), FP32)] * 5 + [((1, 2, 8), FP32)],
            [((1, 2, 8, 4), FP32)] * 3,
        ),
        op("bernoulli_.float", [((6, 9), torch.bool)], [((6, 9), torch.bool)]),
        op(
            "blockwise_attention.default",
            [((1, 4, 8, 4), FP32), *[((1, 2, 8, 4), FP32)] * 2],
            [((1, 4, 8, 4), FP32)],
        ),
        op(
            "blockwise_attention_backward.default",
            [
                *[((1, 4, 8, 4), FP32)] * 2,
                *[((1, 2, 8, 4), FP32)] * 2,
                ((8, 8), torch.bool),
                ((1, 4, 8, 8), torch.bool),
            ],
            [((1, 4, 8, 4), FP32), *[((1, 2, 8, 4), FP32)] * 2],
        ),
        # With sinks, as in gpt-oss.
        op(
            "blockwise_attention.default",
            [((1, 4, 8, 4), FP32), *[((1, 2, 8, 4), FP32)] * 2, ((8, 8), torch.bool), ((4,), FP32)],
            [((1, 4, 8, 4), FP32)],
        ),
        op(
            "blockwise_attention_backward.default",
            [*[((1, 4, 8, 4), FP32)] * 2, *[((1, 2, 8, 4), FP32)] * 2, ((4,), FP32)],
            [((1, 4, 8, 4), FP32), *[((1, 2, 8, 4), FP32)] * 2, ((4,), FP32)],
        ),
        op(
            "grouped_linear.default",
            [((6, 8), FP32), ((3, 4, 8), FP32), ((3,), torch.int32)],
            [((6, 4), FP32)],
        ),
        op(
            "grouped_linear_backward.default",
            [((6, 4), FP32), ((6, 8), FP32), ((3, 4, 8), FP32), ((3,), torch.int32)],
            [((6, 8), FP32), ((3, 4, 8), FP32)],
        ),
    ],
    ids=lambda one: one.name,
)
def test_each_operator_of_a_step_can_be_run_from_its_shapes(one: Operator) -> None:
    assert can_replay(one)
    assert time_operator(one, (False, True), most_seconds=0.0, most_runs=1) > 0


def test_too_large_an_operator_is_not_run() -> None:
    assert not can_replay(add(2**30))
    assert not can_replay(op("unheard_of.default", [((4,), FP32)], [((4,), FP32)]))


def test_the_standard_operators_differ_and_can_be_run() -> None:
    found = standard_operators()
    keys = [features_of(one, turned).key for one, turned in found]
    assert len(set(keys)) == len(keys)
    assert all(can_replay(one) for one, _ in found)


def test_entries_keep_their_median() -> None:
    entry = Entry("group", (1.0,), 1.0, "stream", [3.0, 1.0, 2.0])
    assert entry.ratio == 2.0
    assert replace(entry, ratios=[5.0]).ratio == 5.0


def test_lists_that_do_not_belong_together_are_not_run() -> None:
    lists: list[Layout] = [((5,), torch.float32), ((9,), torch.float32)]
    tensors = (*lists, *lists[::-1], *lists, *lists, ((), torch.float32), ((), torch.float32))
    mixed = Operator("aten._fused_adamw_.default", "optimizer", tensors, (), 0, 0)
    with pytest.raises(ValueError, match="don't belong together"):
        time_operator(mixed, (False, False), most_seconds=0.1)

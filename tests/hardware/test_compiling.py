"""Compile times: the defaults, and the times measured earlier on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.hardware.compiling import NOT_COMPILED, Compiler, Compiling, best_compile_mode

H100 = Compiler("cuda", "H100", cores=16)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr("firstlight.hardware.compiling.cache_folder", lambda: folder)
    return folder


def seconds_of(compiler: Compiler, size: tuple[int, int]) -> list[float]:
    """Return the compile seconds of a layer and the loss, and of the whole model."""
    return [way.seconds for way in compiler.modes(size)]


def test_compile_modes_without_stored_times_use_defaults() -> None:
    assert seconds_of(H100, (768, 12)) == [12.0, 28.0]
    assert seconds_of(Compiler("cuda", "T4", cores=2), (768, 12)) == [36.0, 84.0]
    regional, whole = H100.modes((768, 12))
    assert (regional.regional, whole.regional) == (True, False)
    assert 1 < regional.gain < whole.gain
    assert 1 < regional.launch_gain < whole.launch_gain


def test_compile_time_under_other_load_is_longer() -> None:
    assert [way.seconds for way in H100.modes((768, 12), is_busy=True)] == [48.0, 112.0]


def test_compile_gain_on_cpu_is_lower_for_wide_models() -> None:
    gains = [Compiler("cpu", "", 2).modes((width, 4))[0].gain for width in (64, 192, 768)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1
    regional, whole = Compiler("cpu", "", 2).modes((64, 4))
    assert regional.gain < whole.gain  # so that long runs compile the whole model


def test_compile_time_stored_for_one_model_scales_all_and_minimum_counts() -> None:
    H100.remember((768, 12), 24.0, regional=True)
    assert seconds_of(H100, (768, 12)) == [24.0, 56.0]
    assert seconds_of(H100, (512, 8)) == [24.0, 40.0]
    # Longer, because of other load on the machine.
    H100.remember((768, 12), 280.0, regional=False)
    assert seconds_of(H100, (768, 12)) == [24.0, 56.0]
    H100.remember((512, 8), 30.0, regional=False)
    assert seconds_of(H100, (768, 12)) == [18.0, 42.0]
    # Nothing is remembered for another device or a GPU without a name.
    for other in (Compiler("cuda", "A100", cores=16), Compiler("cuda", "", cores=16)):
        assert seconds_of(other, (768, 12)) == [12.0, 28.0]


@pytest.mark.parametrize("content", ["", "[1]", '{"a": "b"}', "null", "\udc80"])
def test_compile_time_damaged_file_is_ignored(cache: Path, content: str) -> None:
    cache.mkdir()
    path = cache / "compile_times.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    assert seconds_of(H100, (768, 12)) == [12.0, 28.0]
    H100.remember((768, 12), 56.0, regional=False)
    assert seconds_of(H100, (768, 12)) == [24.0, 56.0]


def test_compile_time_cache_not_writable_is_ignored(cache: Path) -> None:
    cache.write_text("a file", encoding="utf-8")
    H100.remember((768, 12), 56.0, regional=False)
    assert seconds_of(H100, (768, 12)) == [12.0, 28.0]


def test_best_compile_mode_saves_more_than_compile_time() -> None:
    way = Compiling(True, seconds=10.0, gain=2.0)
    # Compiling saves half of the time. With the margin, it pays off for runs of 30 s or more.
    ways = [NOT_COMPILED, way]
    assert best_compile_mode(ways, lambda one: 29.9 / one.gain) is NOT_COMPILED
    assert best_compile_mode(ways, lambda one: 30.1 / one.gain) is way
    assert best_compile_mode([way], lambda one: 1.0 / one.gain) is way


def test_compile_mode_leaves_a_tenth_of_time_for_steps() -> None:
    way = Compiling(True, seconds=10.0)
    assert [way.left_of(seconds) for seconds in (30.0, 10.0, 5.0)] == [20.0, 1.0, 0.5]

"""`benchmarks gpu`: order, time, resuming, what fails, and the pages, without measuring."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.gpu import bench as gpu
from benchmarks.gpu.bench import bench_gpu, report
from benchmarks.gpu.parts import (
    BenchMachine,
    Call,
    Findings,
    Page,
    Part,
    Results,
    Row,
    run_rows,
)
from benchmarks.gpu.run import RUN
from benchmarks.gpu.training import TRAINING
from benchmarks.options import GPUBench
from benchmarks.pages import markdown_table
from benchmarks.training import ShardRows, open_rows
from firstlight.bench.models import find_model
from firstlight.bench.runner import RowOutcome
from firstlight.errors import ConfigError, InputError
from firstlight.hardware.device import find_hardware
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.recipe import parse_recipe
from firstlight.recipe.resolve import facts_here, resolve

_GPU = BenchMachine(
    device="cuda",
    dry=False,
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=81559 * 2**20,
    bf16=True,
    capability=(9, 0),
    driver="580.1",
    cuda="13.0",
    torch="2.11.0+cu130",
    python="3.12.3",
)


@dataclass
class World:
    """A clock, and measurements that take their row's `request["takes"]` seconds of it."""

    now: float = 0.0
    asked: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def measure(self, row: Row, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.asked.append(row.name)
        self.limits[row.name] = seconds
        takes = request.get("takes", row.seconds)
        self.now += min(takes, seconds)
        if takes > seconds:
            return {"error": {"type": "TimeoutError", "message": f"took more than {seconds:.0f} s"}}
        if "fails" in request:
            return {"error": {"type": "Failed", "message": request["fails"]}}
        return {"x": float(len(self.asked))}

    def call(self, folder: Path, minutes: float = 9.0) -> Call:
        return Call(minutes, folder, self.measure, clock=self.clock)


def _row(name: str, seconds: float = 10, **options: Any) -> Row:
    request = options.pop("request", {})
    return Row(name, "module", request, seconds, **options)


def test_rows_are_measured_by_their_value(tmp_path: Path) -> None:
    parts = {
        "one": [_row("a", value=2), _row("first", value=1)],
        "two": [_row("c", value=2), _row("no", value=1, skip="no GPU"), _row("last", value=9)],
    }
    world = World()
    assert run_rows(parts, Results(tmp_path), world.call(tmp_path)) == []
    assert world.asked == ["first", "a", "c", "last"]


def test_the_next_call_goes_on_from_the_file_alone(tmp_path: Path) -> None:
    rows = {"p": [_row("a", 50), _row("b", 50), _row("c", 150)]}
    first = World()
    left = run_rows(rows, Results(tmp_path), first.call(tmp_path, minutes=3))
    assert first.asked == ["a", "b"]
    assert [(part, row.name) for part, row in left] == [("p", "c")]
    second, results = World(), Results.read(tmp_path)
    assert run_rows(rows, results, second.call(tmp_path, minutes=3)) == []
    assert second.asked == ["c"]
    assert Results.read(tmp_path).outcomes["p"]["b"].values("x") == [2.0]


def test_a_row_that_fails_ends_no_other_and_is_tried_again_when_asked(tmp_path: Path) -> None:
    rows = {
        "p": [
            _row("oom", request={"fails": "CUDA out of\n memory"}),
            _row("slow", seconds=10, request={"takes": 1000}),
            _row("fine"),
        ]
    }
    world, results = World(), Results(tmp_path)
    assert run_rows(rows, results, world.call(tmp_path)) == []
    assert world.asked == ["oom", "slow", "fine"]
    assert results.outcomes["p"]["oom"].problem == "CUDA out of memory"
    assert results.outcomes["p"]["slow"].problem == "took more than 90 s"
    again = World()
    read = Results.read(tmp_path)
    run_rows(rows, read, again.call(tmp_path))
    assert again.asked == []
    for row in rows["p"]:
        read.outcome("p", row, retry=True)
    run_rows(rows, read, again.call(tmp_path))
    assert again.asked == ["oom", "slow"]


def test_a_row_that_the_end_of_a_call_cuts_off_is_expected_to_take_longer(tmp_path: Path) -> None:
    rows = {"p": [_row("slow", seconds=50, request={"takes": 100})]}
    world, results = World(), Results(tmp_path)
    left = run_rows(rows, results, world.call(tmp_path, minutes=1.5))
    assert [row.name for _, row in left] == ["slow"]
    assert results.outcomes["p"]["slow"].problem == ""
    assert results.outcomes["p"]["slow"].expected_seconds(50) == 1.5 * 85
    assert run_rows(rows, Results.read(tmp_path), world.call(tmp_path, minutes=2)) != []
    assert run_rows(rows, Results.read(tmp_path), world.call(tmp_path, minutes=9)) == []
    assert world.asked == ["slow", "slow"]


def test_another_declaration_is_measured_again(tmp_path: Path) -> None:
    world = World()
    for steps, asked in ((1, 1), (1, 1), (2, 2)):
        rows = {"p": [_row("a", request={"steps": steps})]}
        run_rows(rows, Results.read(tmp_path), world.call(tmp_path))
        assert len(world.asked) == asked


@given(
    st.lists(st.tuples(*[st.integers(1, 200)] * 2, st.integers(1, 9)), max_size=12),
    st.integers(1, 9),
)
def test_calls_keep_their_minutes_and_end_with_every_row_or_a_row_too_long(
    drawn: list[tuple[int, int, int]], minutes: int
) -> None:
    rows = [
        _row(str(i), seconds=expected, request={"takes": takes}, value=value)
        for i, (expected, takes, value) in enumerate(drawn)
    ]
    results, world = Results(Path("unused")), World()
    results.write = lambda: None  # type: ignore[method-assign]
    for _ in range(60):
        world.now = 0.0
        left = run_rows({"p": rows}, results, world.call(Path("unused"), minutes))
        assert world.now <= 60 * minutes
        if not left:
            break
    for _, row in left:
        assert results.outcome("p", row).expected_seconds(row.seconds) > 60 * minutes - 5
    left_over = {row.name for _, row in left}
    assert all(row.name in left_over or results.outcome("p", row).is_done for row in rows)


@pytest.mark.parametrize("content", ["{}", '{"format": 0}', '{"format": 1, "outcomes": []}'])
def test_a_file_that_is_no_result_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"results\.json is not a file of results"):
        Results.read(tmp_path)


def _page(found: Findings) -> Page:
    rows = [(row.name, found.median("toy", row.name, "x")) for row in found.measured("toy")]
    return Page("- a toy figure", markdown_table(("row", "x"), rows), {"gpu-toy.png": b"PNG"})


_TOY = Part(
    "toy",
    "A toy",
    "A toy is measured.",
    lambda machine: [
        _row("good", request={"device": machine.device}),
        _row("bad", request={"fails": "CUDA out of memory"}),
        _row("never", seconds=10_000),
        _row("not here", skip="no units for fp8"),
    ],
    _page,
)
_OTHER = Part("other", "Another", "Another is measured.", lambda _: [], _page)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[[BenchMachine], None]:
    """Sets the machine; the parts are the toy's."""
    monkeypatch.setattr(gpu, "PARTS", (_TOY, _OTHER))

    def use(machine: BenchMachine) -> None:
        def ask(module: str, *_: object) -> dict[str, Any]:
            assert module == "benchmarks.gpu.parts"
            return machine.to_json()

        monkeypatch.setattr(gpu, "ask", ask)

    return use


def test_a_call_says_what_came_of_it(tmp_path: Path, toy: Callable[[BenchMachine], None]) -> None:
    toy(_GPU)
    result = bench_gpu(GPUBench(tmp_path, parts=["toy"]), World().measure)
    assert (result["measured"], result["rows"]) == (1, 4)
    assert result["failed"] == {"toy: bad": "CUDA out of memory"}
    assert result["skipped"] == {"toy: not here": "no units for fp8"}
    assert result["left"] == ["toy: never"]
    assert result["left_seconds"] == 10_000
    kept = Results.read(tmp_path)
    assert BenchMachine.from_json(kept.machine) == _GPU
    assert [call["turns"] for call in kept.calls] == [2]


@pytest.mark.parametrize("other", [{"name": "NVIDIA H200"}, {"dry": True, "device": "cpu"}])
def test_results_of_another_machine_are_refused(
    other: Mapping[str, Any], tmp_path: Path, toy: Callable[[BenchMachine], None]
) -> None:
    toy(_GPU)
    bench_gpu(GPUBench(tmp_path), World().measure)
    toy(replace(_GPU, **other))
    with pytest.raises(ConfigError, match="holds figures of a NVIDIA H100 80GB HBM3, and this is"):
        bench_gpu(GPUBench(tmp_path), World().measure)


def test_what_can_not_be_meant_is_refused(
    tmp_path: Path, toy: Callable[[BenchMachine], None]
) -> None:
    toy(_GPU)
    with pytest.raises(ConfigError, match=r"part 'toys' is unknown \(did you mean 'toy'\?\)"):
        bench_gpu(GPUBench(tmp_path, parts=["toys"]), World().measure)
    with pytest.raises(ConfigError, match="--minutes 0: more than 0"):
        bench_gpu(GPUBench(tmp_path, minutes=0), World().measure)
    with pytest.raises(InputError, match="missing is not a folder"):
        report(tmp_path / "missing", tmp_path / "pages")


def test_the_pages_hold_what_was_measured_and_why_the_rest_was_not(
    tmp_path: Path, toy: Callable[[BenchMachine], None]
) -> None:
    toy(_GPU)
    bench_gpu(GPUBench(tmp_path), World().measure)
    written = report(tmp_path, tmp_path / "docs")
    names = {str(path.relative_to(tmp_path / "docs")) for path in written}
    assert names == {"gpu.md", "benchmarks/gpu-toy.md", "images/gpu-toy.png"}
    overview = (tmp_path / "docs/gpu.md").read_text(encoding="utf-8")
    toy_section, other = overview.split("## A toy")[1].split("## Another")
    assert "- a toy figure" in toy_section
    assert "(benchmarks/gpu-toy.md)" in toy_section
    assert "Not measured yet." in other
    page = " ".join((tmp_path / "docs/benchmarks/gpu-toy.md").read_text(encoding="utf-8").split())
    for part in (
        "NVIDIA H100 80GB HBM3, 80 GiB",
        "driver 580.1",
        "CUDA 13.0",
        "torch 2.11.0+cu130",
        "| good | 1.0 |",
        "- bad: failed: CUDA out of memory",
        "- never: not measured yet",
        "- not here: skipped: no units for fp8",
        "python -m benchmarks gpu --out DIR --parts toy",
    ):
        assert part in page


def test_figures_of_a_dry_run_do_not_get_into_the_docs(
    tmp_path: Path, toy: Callable[[BenchMachine], None]
) -> None:
    toy(replace(_GPU, dry=True, device="cpu"))
    bench_gpu(GPUBench(tmp_path, dry=True), World().measure)
    with pytest.raises(ConfigError, match="figures of a dry run: name another place with --pages"):
        report(tmp_path, None)


def test_the_committed_page_says_what_the_code_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made again by `benchmarks gpu --report FOLDER`, with gpu-results.json as its results.json and
    gpu-run-report.png as its run-report.png."""
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    shutil.copyfile(docs / "benchmarks/gpu-results.json", tmp_path / "results.json")
    shutil.copyfile(docs / "images/gpu-run-report.png", tmp_path / "run-report.png")
    report(tmp_path, tmp_path / "pages")
    pages = sorted(path.relative_to(tmp_path / "pages") for path in tmp_path.rglob("*.md"))
    assert [page.stem for page in pages] == [
        "gpu-ceilings",
        "gpu-generation",
        "gpu-ladder",
        "gpu-planner",
        "gpu-run",
        "gpu-training",
        "gpu",
    ]
    for page in pages:
        made = (tmp_path / "pages" / page).read_text(encoding="utf-8")
        assert made == (docs / page).read_text(encoding="utf-8"), page


@pytest.mark.parametrize("dry", [True, False])
def test_the_rows_of_every_part_can_be_told_apart_and_end_within_a_call(dry: bool) -> None:
    machine = replace(_GPU, dry=dry, device="cpu" if dry else "cuda")
    rows = {part.name: part.rows(machine) for part in gpu.PARTS}
    for part, these in rows.items():
        assert len({row.name for row in these}) == len(these), part
        json.dumps([row.request for row in these])
        assert all(row.seconds < 530 for row in these), part
    every = [row for these in rows.values() for row in these if not row.skip]
    assert sum(row.seconds for row in every if dry or row.value == 1) <= 530


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "takes --out DIR to measure, or --report DIR to write the pages"),
        (["--out", "a", "--report", "b"], "takes --out DIR to measure, or --report DIR"),
        (["--out", "a", "--parts", "ceiling"], "part 'ceiling' is unknown (did you mean 'ceil"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_rows_of_a_prepared_corpus_come_in_their_order_and_again(data: Path) -> None:
    rows = open_rows(data, 16)
    assert isinstance(rows, ShardRows)
    tokens = rows.dataset[slice(0, rows.count * 16 + 1)]
    batch = rows.batch(rows.count - 1, 2, documents=False)
    assert batch.input_ids.tolist() == [tokens[-17:-1].tolist(), tokens[:16].tolist()]
    assert batch.labels.tolist() == [tokens[-16:].tolist(), tokens[1:17].tolist()]
    assert rows.batch(0, 1, documents=True).document_ids is not None


def _training(rates: Mapping[str, Sequence[float]], **machine: Any) -> Findings:
    """Findings of `TRAINING` with steps of 1,000 tokens, by row."""
    used = replace(_GPU, **machine)
    outcomes = {
        "training": {
            name: RowOutcome(
                runs=[
                    {
                        "step_seconds": [1000 / rate],
                        "tokens": 1000,
                        "first_step_seconds": 9.0,
                        "peak_bytes": 2**30,
                        "final_loss": 5.0,
                    }
                    for rate in these
                ]
            )
            for name, these in rates.items()
        },
        "ceilings": {"bf16": RowOutcome(runs=[{"ceiling": 8e14}])},
    }
    return Findings(used, outcomes, {"training": TRAINING.rows(used)})


def test_the_page_of_training_sets_rates_beside_ceilings_and_the_bare_loop() -> None:
    rates = {"gpt2-124m, firstlight": [4e5, 6e5], "gpt2-124m, reference": [4e5, 4e5]}
    page = TRAINING.page(_training(rates))
    flops = train_flops_per_token(meta_model(find_model("gpt2-124m")), 1024)
    assert f"500,000 tokens/s, {5e5 * flops / 8e14:.1%} of the measured" in page.summary
    assert f"{5e5 * flops / 989e12:.1%} of the data sheet's" in page.summary
    assert "1.25 times the bare loop's" in page.summary
    assert "| 1.25 (1.00-1.50) | 1.0 |" in page.text
    assert "llama-1b" not in page.text
    assert page.pictures["gpu-training-gpt2-124m.png"].startswith(b"\x89PNG")


def test_batches_are_as_large_as_the_gpu() -> None:
    def rows(memory_gib: int) -> set[int]:
        machine = replace(_GPU, memory_bytes=memory_gib * 2**30)
        rows = TRAINING.rows(machine)
        return {r.request["micro_batch_size"] for r in rows if r.name.startswith("gpt2")}

    assert [rows(size) for size in (140, 80, 24)] == [{64}, {32}, {8}]
    for row in TRAINING.rows(_GPU):
        recipe = parse_recipe({**row.request["recipe"], "run": {"device": "cpu"}})
        resolved = resolve(recipe, facts_here(find_hardware("cpu")))
        assert resolved.batch.accumulation(resolved.data.seq_len) >= 1
        rows_a_step = resolved.batch.micro_batch_size * resolved.batch.accumulation(
            resolved.data.seq_len
        )
        assert rows_a_step == row.request["micro_batch_size"]


def test_the_page_of_the_run_shows_its_curve_and_its_report(tmp_path: Path) -> None:
    (tmp_path / "run-report.png").write_bytes(b"PNG of the run")
    run = {
        "wall_seconds": 171.0,
        "command": "firstlight train stdlib --budget 3m",
        "budget": 180.0,
        "choices": [
            {"key": "model.hidden_size", "value": 640, "reason": "the least expected loss"},
            {"key": "init.head_std", "value": 0.001, "reason": ""},
        ],
        "parameters": 54.82e6,
        "bits_per_byte": 1.046,
        "gzip": 1.945,
        "xz": 1.609,
        "expected": [0.92, 1.19],
        "forecast": {"predicted": {"peak_bytes": 5 * 2**30}, "measured": {"peak_bytes": 2**32}},
        "median_rate": 4.1e5,
        "curve": [[65536, 10.8], [78643200, 1.5]],
        "validation": [[6553600, 3.5]],
        "last": {"step": 1638, "tokens_seen": 13418496, "epoch": 4.0},
    }
    (row,) = RUN.rows(_GPU)
    outcomes = {"run": {row.name: RowOutcome(runs=[run])}}
    page = RUN.page(Findings(_GPU, outcomes, {"run": [row]}, tmp_path))
    assert "13 million tokens: 1.046 bits per byte, 0.92 to 1.19 expected; xz 1.609" in page.summary
    assert "171 s of 180 s" in page.summary
    assert "| peak of tensors, predicted | 4.00 GiB, 5.00 GiB |" in page.text
    assert "| model.hidden_size | 640 | the least expected loss |" in page.text
    assert "init.head_std" not in page.text
    assert page.pictures["gpu-run-report.png"] == b"PNG of the run"
    assert page.pictures["gpu-run.png"].startswith(b"\x89PNG")

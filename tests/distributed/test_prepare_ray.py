"""Preparing on a Ray cluster gives the same bytes as one process, even if processes are killed
meanwhile.

The cluster is real: two nodes of one processor each, on this machine.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import psutil
import pytest
import tokenizers

from firstlight.cli.main import main
from firstlight.data import encoding
from firstlight.data.prepare import prepare
from firstlight.errors import ConfigError, DataError
from firstlight.tokenizer import Tokenizer, formats

ray = pytest.importorskip("ray")

# Ray itself uses functions that it has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    # Ray ends a thread that still waits for a cluster that a test has shut down.
    "ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning",
)

_NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


class Prepare(Protocol):
    """`prepare` with a fixed engine."""

    def __call__(self, inputs: Any, tokenizer: Any, out: Path, **options: Any) -> dict[str, Any]:
        """See `prepare`."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    utilities = pytest.importorskip("ray.cluster_utils")
    # A node started by this process, and a connection to it, install a handler of their own for
    # SIGTERM.
    before = signal.getsignal(signal.SIGTERM)
    cluster = utilities.Cluster(
        initialize_head=True, head_node_args={**_NODE, "include_dashboard": False}
    )
    try:
        cluster.add_node(**_NODE)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def connection(cluster: Any) -> Iterator[None]:
    """Return one connection for all tests. Each connection starts processes on the nodes, which
    takes seconds.
    """
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def on_ray(connection: None, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Run `prepare` on the cluster with small chunks and blocks, eight blocks at a time."""
    monkeypatch.setattr(encoding, "_BLOCK_CHARACTERS", 1000)
    monkeypatch.setattr(formats, "_PIECE_CHARACTERS", 100)

    def run(inputs: Any, tokenizer: Any, out: Path, **options: Any) -> dict[str, Any]:
        return prepare(inputs, tokenizer, out, engine="ray", **options)

    return run


@pytest.fixture
def mixed(tmp_path: Path, texts: list[str]) -> Path:
    """Write files of all kinds, with rejected documents and chunks of a long one."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "in"
    folder.mkdir()
    for number, text in enumerate(texts[:20]):
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    (folder / "long.md").write_text("".join(texts[:60]), encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"Gr\xfcn")
    lines = [json.dumps({"text": text}).encode() for text in texts[20:70]]
    lines[10:10] = [b"", b"broken", b'{"text": "\xff"}', b'{"title": "x"}']
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    column = [*texts[70:], None, " "]
    parquet.write_table(arrow.table({"text": column}), folder / "table.parquet")
    return folder


# The same bytes


def test_prepare_on_ray_matches_files_of_one_process(
    tmp_path: Path, mixed: Path, tokenizer: Tokenizer, on_ray: Prepare
) -> None:
    options: dict[str, Any] = {"val_fraction": 0.2, "shard_tokens": 3000}
    one = prepare([mixed], tokenizer, tmp_path / "one", workers=1, **options)
    assert on_ray([mixed], tokenizer, tmp_path / "ray", **options) == one
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    rejected = {"bad_utf8": 2, "broken_json": 1, "empty": 2, "no_text": 2}
    assert one["documents"]["rejected"] == rejected
    assert {"train-00001.bin", "val-00000.bin", "rejected.jsonl"} <= set(names(tmp_path / "ray"))
    assert ray.is_initialized()


def test_prepare_on_ray_holds_out_same_tail_of_single_file(
    tmp_path: Path, texts: list[str], tokenizer: Tokenizer, on_ray: Prepare
) -> None:
    (tmp_path / "a.txt").write_text("".join(texts[:40]), encoding="utf-8")
    one = prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "one", workers=1)
    on_ray([tmp_path / "a.txt"], tokenizer, tmp_path / "ray")
    assert one["split_by"] == "tail"
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")


def test_prepare_on_ray_ids_above_65535_are_kept(tmp_path: Path, on_ray: Prepare) -> None:
    words = {f"w{number}": number for number in range(70_000)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(backend, eos_token="w1")
    (tmp_path / "a.txt").write_text("w65535 w65536 w69999 " * 200, encoding="utf-8")
    manifest = prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "one", workers=1)
    on_ray([tmp_path / "a.txt"], tokenizer, tmp_path / "ray")
    assert manifest["dtype"] == "uint32"
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")


def test_prepare_on_ray_out_of_order_blocks_are_reordered(
    tmp_path: Path,
    corpus: Path,
    tokenizer: Tokenizer,
    on_ray: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare([corpus], tokenizer, tmp_path / "one", workers=1)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(encoding, "_encode_block", waiting(tmp_path, blocks=6))
    on_ray([corpus], tokenizer, tmp_path / "ray")
    assert (tmp_path / "last").exists()
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")


def waiting(folder: Path, blocks: int) -> Callable[..., Any]:
    """Return an encoding function whose first block waits until this many others have been
    encoded.
    """
    encode_block = encoding._encode_block

    # A nested function is pickled by value: the nodes can't import a test.
    def encode(*arguments: Any) -> Any:
        number = 0
        while True:
            try:
                open(folder / f"begun-{number}", "x").close()
                break
            except FileExistsError:
                number += 1
        if number == 0:
            # Opening one end of a pipe waits until the other end is opened.
            open(folder / "pipe", "rb").close()
        encoded = encode_block(*arguments)
        if number == blocks:
            open(folder / "last", "x").close()
            open(folder / "pipe", "wb").close()
        return encoded

    return encode


# Killed during preparation


def dying(folder: Path, blocks: tuple[int, ...], node: str | None) -> Callable[..., Any]:
    """Return an encoding function that kills a process with SIGKILL at some of the blocks.

    Args:
        folder: an empty folder, in which each block creates a file when its encoding starts, named
            by the time.
        blocks: numbers of the blocks at which to kill; the others are encoded.
        node: kill its raylet, which runs all of a node's processes and holds what they have made,
            at the first of `blocks` or a later one that runs there; blocks of other nodes wait for
            that, each a second at most: Ray may have given all blocks that are waiting to one node.
            None kills the process of the block.
    """
    encode_block = encoding._encode_block

    # A nested function is pickled by value: the nodes can't import a test.
    def encode(*arguments: Any) -> Any:
        number = 0
        while True:
            try:
                open(folder / f"{number:03d}", "x").close()
                break
            except FileExistsError:
                number += 1
        if node is None and number in blocks:
            open(folder / f"killed-{number}", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if node == ray.get_runtime_context().get_node_id() and number >= blocks[0]:
            open(folder / "killed-node", "x").close()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + 1
        while node is not None and number >= blocks[0] and time.monotonic() < end:
            if (folder / "killed-node").exists():
                break
            time.sleep(0.01)
        return encode_block(*arguments)

    return encode


def killed(folder: Path) -> set[str]:
    return {path.name.removeprefix("killed-") for path in folder.glob("killed-*")}


@pytest.mark.slow
def test_prepare_on_ray_killed_workers_change_no_byte(
    tmp_path: Path,
    mixed: Path,
    tokenizer: Tokenizer,
    on_ray: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare([mixed], tokenizer, tmp_path / "one", workers=1)
    (tmp_path / "begun").mkdir()
    encode = dying(tmp_path / "begun", (0, 9, 10, 30), None)
    monkeypatch.setattr(encoding, "_encode_block", encode)
    on_ray([mixed], tokenizer, tmp_path / "ray")
    assert killed(tmp_path / "begun") == {"0", "9", "10", "30"}
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")


@pytest.mark.slow
def test_prepare_on_ray_killed_node_changes_no_byte(
    tmp_path: Path,
    mixed: Path,
    tokenizer: Tokenizer,
    cluster: Any,
    on_ray: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare([mixed], tokenizer, tmp_path / "one", workers=1)
    (tmp_path / "begun").mkdir()
    lost = cluster.add_node(**_NODE)
    cluster.wait_for_nodes()
    encode = dying(tmp_path / "begun", (12,), lost.node_id)
    monkeypatch.setattr(encoding, "_encode_block", encode)
    try:
        on_ray([mixed], tokenizer, tmp_path / "ray")
    finally:
        cluster.remove_node(lost, allow_graceful=False)
    assert killed(tmp_path / "begun") == {"node"}
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")


# Errors


def test_prepare_on_ray_tokenizer_error_matches_one_process(
    tmp_path: Path,
    tokenizer: Tokenizer,
    corpus: Path,
    on_ray: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode_block = encoding._encode_block

    def encode(*arguments: Any) -> Any:
        with mock.patch.object(Tokenizer, "encode_batch", return_value=[[0, 70_000]]):
            return encode_block(*arguments)

    monkeypatch.setattr(encoding, "_encode_block", encode)
    message = "produced id 70000, beyond its vocabulary of 320 tokens: its files are damaged"
    with pytest.raises(DataError, match=rf"^the tokenizer {message}"):
        on_ray([corpus], tokenizer, tmp_path / "new" / "out")
    assert names(tmp_path) == []


def test_prepare_on_ray_other_tokenizers_release_raises(
    tmp_path: Path,
    tokenizer: Tokenizer,
    corpus: Path,
    on_ray: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = tokenizers.__version__
    monkeypatch.setattr(tokenizers, "__version__", "9.9.9")
    message = rf"^node \S+ has tokenizers {release}, but this machine has 9\.9\.9, .*: install"
    with pytest.raises(DataError, match=message):
        on_ray([corpus], tokenizer, tmp_path / "out")
    assert names(tmp_path) == []


def test_prepare_on_ray_nodes_without_package_raises_data_error(
    tmp_path: Path,
    tokenizer: Tokenizer,
    corpus: Path,
    on_ray: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    here_only = types.ModuleType("of_this_machine_only")
    exec("def encode(*arguments): ...", vars(here_only))  # noqa: S102
    monkeypatch.setitem(sys.modules, here_only.__name__, here_only)
    monkeypatch.setattr(encoding, "_encode_block", here_only.encode)
    message = (
        r"^the ray cluster failed \(.*No module named 'of_this_machine_only'.*\): check that "
        r"its nodes are running and have firstlight\[ray\]"
    )
    with pytest.raises(DataError, match=message) as caught:
        on_ray([corpus], tokenizer, tmp_path / "out")
    assert len(str(caught.value)) < 300
    assert names(tmp_path) == []
    assert capfd.readouterr() == ("", "")


def test_prepare_on_ray_error_on_node_raises_data_error(
    tmp_path: Path,
    tokenizer: Tokenizer,
    corpus: Path,
    on_ray: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def encode(*_: Any) -> Any:
        raise OSError("there is no room here")

    monkeypatch.setattr(encoding, "_encode_block", encode)
    with pytest.raises(
        DataError, match=r"^the ray cluster failed \(OSError: there is no room here"
    ):
        on_ray([corpus], tokenizer, tmp_path / "out")
    assert names(tmp_path) == []
    assert capfd.readouterr() == ("", "")


def test_prepare_on_ray_existing_connection_with_address_raises(
    tmp_path: Path, tokenizer: Tokenizer, corpus: Path, cluster: Any, on_ray: Prepare
) -> None:
    with pytest.raises(ConfigError, match="connected to a ray cluster: omit ray_address"):
        on_ray([corpus], tokenizer, tmp_path / "out", ray_address=cluster.address)
    assert names(tmp_path) == []


# On the command line, with a separate cluster


def run_alone(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python, and check that no process that it started outlives it."""
    mark = f"test-{os.urandom(8).hex()}"
    environment = {**os.environ, "FIRSTLIGHT_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
        **options,
    )
    left = [process for process in psutil.process_iter() if has_mark(process, mark)]
    # Processes that Ray has told to exit may not have exited yet.
    _, alive = psutil.wait_procs(left, timeout=300)
    for process in alive:
        process.kill()
    assert alive == [], f"waited 300 s for the end of {alive}"
    return done


def has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("FIRSTLIGHT_TEST_MARK") == mark
    except psutil.Error:
        return False


@pytest.mark.slow
def test_prepare_on_ray_command_output_matches_run_without_ray(
    tmp_path: Path,
    tokenizer: Tokenizer,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = ["prepare", str(corpus), "--tokenizer", "tokenizer", "--json", "--out", "data"]
    assert main(command) == 0
    expected, files = capsys.readouterr(), contents(tmp_path / "data")
    command += ["--overwrite", "--engine", "ray", "--ray-address", "local"]
    done = run_alone(["-m", "firstlight", *command])
    assert (done.returncode, done.stderr, done.stdout) == (0, expected.err, expected.out)
    assert contents(tmp_path / "data") == files


# Sends itself the signal once blocks are being encoded.
_DRIVER = """
import os, signal, sys
import firstlight.data.prepare as prepare
from firstlight.cli.main import main
from firstlight.data import encoding
from firstlight.data.records import Record

def documents(sources, text_key):
    for number in range(100):
        if number == 40:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        yield Record("made", number, "stone and river " * 1000)

prepare.read_documents = documents
encoding._BLOCK_CHARACTERS = 16_000
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("signal_name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_prepare_on_ray_terminated_leaves_nothing_and_reports_it(
    tmp_path: Path, tokenizer: Tokenizer, corpus: Path, signal_name: str, code: int
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    driver = tmp_path / "driver.py"
    driver.write_text(_DRIVER, encoding="utf-8")
    verb = ["prepare", str(corpus), "--tokenizer", str(tmp_path / "tokenizer"), "--json"]
    place = ["--out", str(tmp_path / "made" / "data"), "--engine", "ray", "--ray-address", "local"]
    done = run_alone([str(driver), signal_name, *verb, *place])
    assert done.returncode == code
    word = "interrupted" if signal_name == "SIGINT" else "terminated"
    assert done.stderr.lstrip("\n").splitlines() == [f"firstlight: error: {word}"]
    assert json.loads(done.stdout)["error"]["message"] == word
    assert names(tmp_path) == ["driver.py", "tokenizer"]

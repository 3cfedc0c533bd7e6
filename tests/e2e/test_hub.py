"""Models of the Hugging Face hub: downloaded, cached, refused, broken off, and whole again.

The hub is that of hub_server.py; the client is huggingface_hub as it is (hub_client.py).
"""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hub_client import FIND, WEIGHTS, Client, write_model
from hub_server import Access, Hub

from firstlight.cli.main import main
from firstlight.errors import ModelError
from firstlight.generation.engine import generate
from firstlight.lora.loading import load_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.hub import find_model_folder
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_processes")

#: huggingface_hub writes so much of a file at once; what a break leaves of it is lost.
CHUNK = 10 * 1024 * 1024


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model folder of a few hundred kilobytes."""
    return write_model(tmp_path_factory.mktemp("hub") / "tiny", tokenizer)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model folder whose weights are more than one chunk, and less than two."""
    folder = tmp_path_factory.mktemp("hub") / "large"
    write_model(folder, tokenizer, hidden_size=384, intermediate_size=1024)
    assert CHUNK + 2_000_000 < (folder / WEIGHTS).stat().st_size < 2 * CHUNK
    return folder


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub, tmp_path / "home")


# From the hub to a text


def test_hub_model_continues_text_like_its_folder(hub: Hub, client: Client, tiny: Path) -> None:
    hub.add("openai-community/tiny", tiny)
    options = ("--max-new-tokens", "4", "--temperature", "0", "--seed", "0", "--device", "cpu")
    done = client.run(
        *("-m", "firstlight", "generate", "openai-community/tiny"),
        *("--prompt", "the first light", *options, "--json"),
    )
    assert done.returncode == 0, done.stderr
    local = generate(tiny, "the first light", max_new_tokens=4, temperature=0, seed=0)
    # One object on one line: the progress of the download is on stderr.
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout) == dataclasses.asdict(local)
    assert "100%" in done.stderr
    assert hub.asked_for() == sorted(contents(tiny))


def test_info_downloaded_model_works_without_hub(
    hub: Hub, client: Client, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add("openai-community/tiny", tiny)
    folder = client.find("openai-community/tiny")
    hub.stop()
    done = client.run("-m", "firstlight", "info", "openai-community/tiny", "--json")
    assert done.returncode == 0, done.stderr
    capfd.readouterr()
    assert main(["info", str(tiny), "--json"]) == 0
    local = json.loads(capfd.readouterr().out)
    assert json.loads(done.stdout) == {**local, "folder": str(folder)}


def test_hub_sharded_weights_are_downloaded_and_loaded(
    hub: Hub, client: Client, tiny: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    sharded = write_model(tmp_path / "sharded", tokenizer, shards=2)
    hub.add("owner/sharded", sharded)
    folder = client.find("owner/sharded")
    assert len(hub.asked_for()) == len(contents(tiny)) + 2
    assert contents(folder) == contents(sharded)
    expected = load_model(tiny).model.state_dict()
    loaded = load_model(folder).model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_hub_download_excludes_duplicates_pickles_and_code(
    hub: Hub, client: Client, tiny: Path, tmp_path: Path
) -> None:
    full = Path(shutil.copytree(tiny, tmp_path / "full"))
    for name in ("chat_template.jinja", "merges.txt", "tokenizer.model"):
        (full / name).write_text(name)
    wanted = sorted(contents(full))
    for name in (
        *("original/params.json", "original/consolidated.00.pth", "onnx/model.safetensors"),
        *("consolidated.safetensors", "consolidated-00001-of-00002.safetensors"),
        *("pytorch_model.bin", "tf_model.h5", "model.gguf", "modeling_tiny.py", "README.md"),
    ):
        (full / name).parent.mkdir(exist_ok=True)
        (full / name).write_text(name)
    hub.add("owner/full", full)
    folder = client.find("owner/full")
    assert sorted(contents(folder)) == wanted
    assert hub.asked_for("GET") == wanted
    assert hub.asked_for("HEAD") == wanted


def test_hub_model_with_only_pickled_weights_raises_and_can_be_converted(
    hub: Hub, client: Client, tiny: Path, tmp_path: Path
) -> None:
    pickled = Path(shutil.copytree(tiny, tmp_path / "pickled"))
    torch.save(safetensors.torch.load_file(pickled / WEIGHTS), pickled / "pytorch_model.bin")
    (pickled / WEIGHTS).unlink()
    hub.add("owner/pickled", pickled)
    folder = client.find("owner/pickled")
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert "`firstlight convert owner/pickled --out DIR`" in str(caught.value)
    assert "pytorch_model.bin" not in hub.asked_for()
    converted = tmp_path / "converted"
    done = client.run("-m", "firstlight", "convert", "owner/pickled", "--out", str(converted))
    assert done.returncode == 0, done.stderr
    assert "pytorch_model.bin" in hub.asked_for()
    found, expected = load_model(converted).model.state_dict(), load_model(tiny).model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Revisions


def test_hub_id_with_revision_loads_that_revision(
    hub: Hub, client: Client, tiny: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    other = write_model(tmp_path / "other", tokenizer, seed=1)
    assert contents(other)[WEIGHTS] != contents(tiny)[WEIGHTS]
    hub.add("owner/tiny", tiny)
    for revision in ("v1", "refs/pr/1", "odd@name"):
        commit = hub.add("owner/tiny", other, revision)
        assert contents(client.find(f"owner/tiny@{revision}")) == contents(other)
    assert contents(client.find(f"owner/tiny@{commit}")) == contents(other)
    assert contents(client.find("owner/tiny")) == contents(tiny)


@pytest.mark.parametrize("revision", ["v2", "0" * 40])
def test_hub_missing_revision_is_named(revision: str, hub: Hub, client: Client, tiny: Path) -> None:
    hub.add("owner/tiny", tiny)
    assert client.refusal(f"owner/tiny@{revision}").endswith(
        f"from the hub: the repository has no revision '{revision}'"
    )


def test_find_model_folder_with_at_sign_is_local_and_empty_revision_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name@v1").mkdir(parents=True)
    assert find_model_folder("owner/name@v1") == Path("owner/name@v1")
    with pytest.raises(ModelError, match="owner/name@ does not exist"):
        find_model_folder("owner/name@")


# The cache


def test_hub_files_are_not_downloaded_twice(hub: Hub, client: Client, tiny: Path) -> None:
    hub.add("owner/tiny", tiny)
    folder = client.find("owner/tiny")
    hub.requests.clear()
    assert client.find("owner/tiny") == folder
    assert hub.asked_for("GET") == hub.asked_for("HEAD") == []
    assert hub.requests, "whether there is a newer version was not asked"


def test_hub_new_version_downloads_only_changed_files(
    hub: Hub, client: Client, tiny: Path, tmp_path: Path
) -> None:
    hub.add("owner/tiny", tiny)
    client.find("owner/tiny")
    newer = Path(shutil.copytree(tiny, tmp_path / "newer"))
    (newer / "generation_config.json").write_text("{}")
    hub.add("owner/tiny", newer)
    hub.requests.clear()
    assert contents(client.find("owner/tiny")) == contents(newer)
    assert hub.asked_for() == ["generation_config.json"]


def test_hub_cached_model_is_used_offline(hub: Hub, client: Client, tiny: Path) -> None:
    hub.add("owner/tiny", tiny)
    folder = client.find("owner/tiny")
    hub.refused = {"GET": 503, "HEAD": 503}
    assert client.find("owner/tiny") == folder
    hub.requests.clear()
    assert client.find("owner/tiny", HF_HUB_OFFLINE="1") == folder
    assert hub.requests == []
    hub.stop()
    assert client.find("owner/tiny") == folder
    assert contents(folder) == contents(tiny)


def test_hub_uncached_model_requires_hub(hub: Hub, client: Client, tiny: Path) -> None:
    hub.add("owner/tiny", tiny)
    start = (
        "ModelError: owner/tiny is not a local folder, and it can't be downloaded from the hub: "
    )
    lack = f"the cache in {client.home / 'hub'} does not contain all files of the model"
    assert client.refusal("owner/tiny", {"HF_HUB_OFFLINE": "1"}) == (
        f"{start}HF_HUB_OFFLINE is set, and {lack}: unset it to download"
    )
    assert hub.requests == []
    for method, status in (("HEAD", "405 Method Not Allowed"), ("GET", "503 Service Unavailable")):
        hub.refused = {method: int(status[:3])}
        message = client.refusal("owner/tiny")
        assert message.startswith(f"{start}{hub.url} is not available (")
        assert status in message
        assert message.endswith(f"), and {lack}: try again later")
    hub.stop()
    message = client.refusal("owner/tiny")
    assert message.startswith(f"{start}{hub.url} is not available (")
    assert "Connection refused" in message


# Tokens


@pytest.mark.parametrize("place", ["variable", "file"])
def test_hub_token_is_sent_to_hub_only(place: str, hub: Hub, client: Client, tiny: Path) -> None:
    hub.add("meta-llama/gated", tiny, access="gated")
    hub.readers = {"hf_reader"}
    client.home.mkdir()
    if place == "file":  # where `hf auth login` puts it
        (client.home / "token").write_text("hf_reader")
    settings = {"HF_TOKEN": "hf_reader"} if place == "variable" else {}
    assert contents(client.find("meta-llama/gated", **settings)) == contents(tiny)
    sent = {
        path: {r.headers.get("authorization") for r in hub.requests if r.path.startswith(path)}
        for path in ("/api/models/", "/meta-llama/", "/cdn/")
    }
    own = {"Bearer hf_reader"}
    assert sent == {"/api/models/": own, "/meta-llama/": own, "/cdn/": {None}}


_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
_NO_REPOSITORY = f"no such repository, or it is private or gated: check the name, or {_LOG_IN}"


@pytest.mark.parametrize("token", [None, "hf_stranger"])
@pytest.mark.parametrize("access", ["gated", "private", None])
def test_hub_inaccessible_model_error_gives_advice(
    access: Access | None, token: str | None, hub: Hub, client: Client, tiny: Path
) -> None:
    hub.strangers = {"hf_stranger"}
    if access is not None:
        hub.add("owner/model", tiny, access=access)
    gated = f"the repository is gated: ask for access at {hub.url}/owner/model, then {_LOG_IN}"
    message = client.refusal("owner/model", {} if token is None else {"HF_TOKEN": token})
    assert message == (
        "ModelError: owner/model is not a local folder, and it can't be downloaded from the hub: "
        + (gated if access == "gated" else _NO_REPOSITORY)
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "mine/rum",
            " (did you mean 'mine/run'?): train it first, or use mine/rum@main for the hub "
            "model of that name",
        ),
        (
            "mien/run",
            " (did you mean 'mine/run'?): train it first, or use mien/run@main for the hub "
            "model of that name",
        ),
        ("mine/else", ": train it first, or use mine/else@main for the hub model of that name"),
        (
            "runs/first",
            ": train it first, or use runs/first@main for the hub model of that name",
        ),
        ("a name/with blanks", ""),
    ],
)
def test_hub_mistyped_path_is_not_requested(
    name: str, told: str, hub: Hub, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert client.refusal(name) == f"ModelError: model folder {name} does not exist{told}"
    assert hub.requests == []


def test_hub_id_with_revision_ignores_local_folder(
    hub: Hub, client: Client, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("mine/tiny", tiny)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert contents(client.find("mine/tiny@main")) == contents(tiny)


def test_prepare_with_hub_tokenizer_downloads_no_weights(
    hub: Hub, client: Client, tiny: Path, tmp_path: Path
) -> None:
    hub.add("owner/tiny", tiny)
    (tmp_path / "a.txt").write_text("the first light " * 50, encoding="utf-8")
    out = tmp_path / "data"
    done = client.run(
        *("-m", "firstlight", "prepare", str(tmp_path / "a.txt"), "--tokenizer", "owner/tiny"),
        *("--out", str(out), "--json"),
    )
    assert done.returncode == 0, done.stderr
    fingerprint = Tokenizer.from_pretrained(tiny).fingerprint
    assert json.loads(done.stdout)["tokenizer_sha256"] == fingerprint
    assert WEIGHTS not in hub.asked_for()


def test_hub_invalid_token_is_named_as_the_problem(hub: Hub, client: Client, tiny: Path) -> None:
    hub.add("owner/tiny", tiny)
    message = client.refusal("owner/tiny", {"HF_TOKEN": "hf_expired"})
    assert message.endswith(f"the hub refused the token: {_LOG_IN} to a valid token")
    assert "hf_expired" not in message


def test_cli_inaccessible_hub_model_prints_one_line(client: Client) -> None:
    done = client.run("-m", "firstlight", "info", "owner/model")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "firstlight: error: owner/model is not a local folder, and it can't be downloaded from "
        f"the hub: {_NO_REPOSITORY}\n"
    )


# Downloads that break


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_hub_broken_download_resumes_where_it_stopped(
    ignores_ranges: bool, hub: Hub, client: Client, large: Path
) -> None:
    hub.add("owner/large", large)
    hub.ignores_ranges = ignores_ranges
    hub.break_off(WEIGHTS, after_bytes=CHUNK + 1_000_000)
    folder = client.find("owner/large")
    assert hub.ranges(WEIGHTS) == [None, f"bytes={CHUNK}-"]
    assert contents(folder) == contents(large)
    load_model(folder)


def test_hub_download_breaking_repeatedly_fails_and_next_call_completes_it(
    hub: Hub, client: Client, large: Path
) -> None:
    hub.add("owner/large", large)
    hub.break_off(WEIGHTS, after_bytes=1000, times=100)
    assert client.refusal("owner/large").startswith("ModelError: owner/large is not a local folder")
    assert len(hub.ranges(WEIGHTS)) > 1, "it did not try again by itself"
    assert client.files(WEIGHTS) == []
    assert "does not contain all" in client.refusal("owner/large", {"HF_HUB_OFFLINE": "1"})
    hub.break_off(WEIGHTS, after_bytes=0, times=0)
    hub.requests.clear()
    # On a busy machine, the weights may be given up before another file is whole.
    missing = sorted(name for name in contents(large) if not client.files(name))
    assert contents(client.find("owner/large")) == contents(large)
    assert hub.asked_for() == missing, "what was whole was downloaded again"


def test_hub_connection_reset_leaves_no_file_that_looks_complete(
    hub: Hub, client: Client, large: Path
) -> None:
    hub.add("owner/large", large)
    hub.break_off(WEIGHTS, after_bytes=CHUNK + 1_000_000, end="reset", times=100)
    assert "Connection reset" in client.refusal("owner/large")
    assert client.files(WEIGHTS) == []
    hub.break_off(WEIGHTS, after_bytes=0, times=0)
    assert contents(client.find("owner/large")) == contents(large)


def test_hub_killed_download_is_completed_by_next_call(
    hub: Hub, client: Client, large: Path
) -> None:
    hub.add("owner/large", large)
    hub.break_off(WEIGHTS, after_bytes=CHUNK + 1_000_000, end="stall")
    with client.start("-c", FIND, "owner/large") as process:
        wait_until("a stalled download", hub.stalled.is_set)
        process.kill()
    assert client.files(WEIGHTS) == []
    assert len(client.files("*.incomplete")) > 0
    assert contents(client.find("owner/large")) == contents(large)
    assert len(hub.ranges(WEIGHTS)) == 2


def test_hub_file_of_unexpected_size_fails(hub: Hub, client: Client, tiny: Path) -> None:
    size = (tiny / WEIGHTS).stat().st_size
    hub.add("owner/tiny", tiny)
    hub.announced[WEIGHTS] = size + 7
    assert f"should be of size {size + 7} but has size {size}" in client.refusal("owner/tiny")
    assert client.files(WEIGHTS) == []
    assert "does not contain all" in client.refusal("owner/tiny", {"HF_HUB_OFFLINE": "1"})
    hub.announced.clear()
    assert contents(client.find("owner/tiny")) == contents(tiny)


def test_hub_full_disk_is_named(hub: Hub, client: Client, large: Path) -> None:
    hub.add("owner/large", large)
    limit = (1_000_000, 1_000_000)
    message = client.refusal(
        "owner/large", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    assert message == (
        f"StorageError: the file size limit was reached at {client.home / 'hub'}: raise it "
        "(ulimit -f) or choose another disk (HF_HOME moves the hub's cache)"
    )
    assert client.files(WEIGHTS) == []


def test_hub_two_processes_share_one_download(hub: Hub, client: Client, large: Path) -> None:
    hub.add("owner/large", large)
    with (
        client.start("-c", FIND, "owner/large") as one,
        client.start("-c", FIND, "owner/large") as other,
    ):
        (first, _), (second, _) = one.communicate(), other.communicate()
    assert one.returncode == other.returncode == 0
    assert first == second
    assert hub.ranges(WEIGHTS) == [None]
    assert contents(Path(first.removesuffix("\n"))) == contents(large)

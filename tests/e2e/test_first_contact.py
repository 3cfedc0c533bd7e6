"""A newcomer's first commands: `firstlight` alone, and inputs that are not text, each answered with
one line that says what to do."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from firstlight.cli.main import main
from firstlight.tokenizer import train_tokenizer

_ENGLISH = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 20
_GERMAN = "Früh übt sich, wer ein Meister werden will: Größe, Straßen und Bäume.\n" * 20
_CHAT = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    {"messages": [{"role": "user", "content": "Ho"}, {"role": "assistant", "content": "Hey"}]},
]
_PDF_WITHOUT_TEXT = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj\n"
    b"trailer<</Root 1 0 R>>\n%%EOF"
)
_PAIRS = [{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}]


def _zip(members: Mapping[str, str]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            # As OpenDocument asks of its first member.
            method = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            archive.writestr(name, content, method)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(_ENGLISH)
        archive.addfile(member, io.BytesIO(_ENGLISH.encode()))
    return file.getvalue()


def _picture(form: str) -> bytes:
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    file = io.BytesIO()
    figure = Figure(figsize=(2, 2))
    figure.add_subplot().plot([1, 3, 2])
    figure.savefig(file, format=form)
    return file.getvalue()


def _database(path: Path) -> bytes:
    with sqlite3.connect(path) as connection:
        connection.execute("create table notes (body text)")
        connection.execute("insert into notes values (?)", (_ENGLISH,))
    connection.close()
    content = path.read_bytes()
    path.unlink()
    return content


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The content of each kind of file, by its usual name."""
    array = io.BytesIO()
    np.save(array, np.arange(1000))
    office = {"[Content_Types].xml": "<Types/>", "_rels/.rels": "<Relationships/>"}
    return {
        "paper.pdf": b"%PDF-1.4\n\xac\xdc" + bytes(100),
        "plot.png": _picture("png"),
        "photo.jpg": _picture("jpg"),
        "letter.docx": _zip({**office, "word/document.xml": "<w:document/>"}),
        "sheet.xlsx": _zip({**office, "xl/workbook.xml": "<workbook/>"}),
        "talk.pptx": _zip({**office, "ppt/presentation.xml": "<p/>"}),
        "letter.odt": _zip(
            {"mimetype": "application/vnd.oasis.opendocument.text", "a.xml": "<x/>"}
        ),
        "novel.epub": _zip({"mimetype": "application/epub+zip", "META-INF/container.xml": "<x/>"}),
        "texts.zip": _zip({"a.txt": _ENGLISH}),
        "texts.tar": _tar(),
        "texts.tar.gz": gzip.compress(_tar()),
        "numbers.npy.gz": gzip.compress(array.getvalue()),
        "numbers.bz2": bz2.compress(array.getvalue()),
        "paper.v2.pdf": _PDF_WITHOUT_TEXT,
        "notes.sqlite": _database(tmp_path_factory.mktemp("database") / "notes.sqlite"),
        "numbers.npy": array.getvalue(),
        "program": Path(sys.executable).read_bytes()[: 1 << 17],
        "random.bin": np.random.default_rng(0).bytes(10_000),
        "chats.json": json.dumps(_CHAT).encode(),
        "chat.json": json.dumps(_CHAT[0], indent=2).encode(),
        "pairs.json": json.dumps(_PAIRS).encode(),
        "texts.json": json.dumps([{"text": _ENGLISH}]).encode(),
        "lines.json": b'{"text": "a line"}\n{"text": "another"}\n',
        "chats.jsonl": "".join(json.dumps(one) + "\n" for one in _CHAT).encode(),
        "pairs.jsonl": "".join(json.dumps(one) + "\n" for one in _PAIRS).encode(),
        "table.csv": b"id,body\n1,some words\n",
        "latin1.txt": _GERMAN.encode("latin-1"),
        "windows.txt": ("„Ja“ – " + _GERMAN).encode("cp1252"),
        "unmarked.txt": _GERMAN.encode("utf-16-le"),
        "blank.txt": b" \n\n",
    }


#: The message about each file, after its name.
_ANSWERS = {
    "paper.pdf": ": it is damaged (",
    "plot.png": " is an image: exclude it, or extract its text with tesseract plot.png plot",
    "photo.jpg": " is an image: exclude it, or extract its text with tesseract photo.jpg ",
    "letter.docx": ": its XML is damaged or too large (",
    "sheet.xlsx": " is a spreadsheet: save it as CSV in a spreadsheet program, and give the ",
    "talk.pptx": " is a presentation: save it as PDF, and use that ",
    "letter.odt": ": it is not an OpenDocument text: exclude it",
    "novel.epub": ": its list of contents is missing: replace it",
    "numbers.npy.gz": " is a compressed file: unpack it with gzip -dc < numbers.npy.gz > numbers",
    "numbers.bz2": " is a compressed file: unpack it with bzip2 -dc < numbers.bz2 > numbers (",
    "paper.v2.pdf": ": its pages are images without text: recognise it with ocrmypdf IN OUT",
    "notes.sqlite": " is an SQLite database: export its text with sqlite3 -header -csv ",
    "numbers.npy": " is a file of numbers: exclude it",
    "program": " is a program: exclude it",
    "random.bin": " is a binary file: exclude it",
    "chats.json": " is JSON of conversations, not text: firstlight prepare --kind chat reads it",
    "chat.json": " is JSON of conversations, not text: firstlight prepare --kind chat reads it",
    "pairs.json": " is JSON of preference pairs, not text: firstlight prepare --kind preference ",
    "texts.json": " is JSON, which must have one text per line: convert it to JSON Lines with jq ",
    "lines.json": " is JSON with one record per line: rename it to end in .jsonl",
    "chats.jsonl": ":1: conversations, not text (fields: messages): firstlight prepare --kind ",
    "pairs.jsonl": ":1: preference pairs, not text (fields: prompt, chosen, rejected): ",
    "table.csv": ":1: no column 'text' (columns: id, body): "
    "use --text-key to name the column that ",
    "latin1.txt": ":1: byte 0xfc is not UTF-8: convert it with iconv -f WINDOWS-1252 -t utf-8 ",
    "windows.txt": ":1: byte 0x84 is not UTF-8: convert it with iconv -f WINDOWS-1252 -t utf-8 ",
    "unmarked.txt": ":1: the file is UTF-16LE: convert it with iconv -f UTF-16LE -t utf-8 ",
    "blank.txt": ":1: empty or only whitespace",
}
_ARCHIVES = ("texts.zip", "texts.tar", "texts.tar.gz")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a tokenizer in it."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer([_ENGLISH], 300).save_pretrained("tok")
    return tmp_path


def failure(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command fails with."""
    assert main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err.removeprefix("firstlight: error: ")


@pytest.mark.parametrize("name", _ANSWERS)
def test_prepare_non_text_file_prints_one_line_with_advice(
    place: Path, capfd: pytest.CaptureFixture[str], files: dict[str, bytes], name: str
) -> None:
    Path(name).write_bytes(files[name])
    prepared = failure(capfd, "prepare", name, "--tokenizer", "tok", "--out", "o")
    assert f"{name}{_ANSWERS[name]}" in prepared
    assert (
        failure(capfd, "tokenizer", "train", name, "--vocab-size", "300", "--out", "o") == prepared
    )
    # The same alone in a folder.
    Path("only").mkdir()
    Path(name).rename(f"only/{name}")
    alone = failure(capfd, "prepare", "only", "--tokenizer", "tok", "--out", "o")
    assert f"only/{name}{_ANSWERS[name][:12]}" in alone
    assert sorted(path.name for path in place.iterdir()) == ["only", "tok"]


def test_prepare_folder_with_one_bad_file_keeps_the_rest(
    place: Path, capfd: pytest.CaptureFixture[str], files: dict[str, bytes]
) -> None:
    Path("mixed").mkdir()
    for name, content in files.items():
        Path("mixed", name).write_bytes(content)
        # And under the name of a text.
        Path("mixed", f"{name.replace('.', '_')}.md").write_bytes(content)
    Path("mixed", "good.txt").write_text(_ENGLISH)
    Path("mixed", "utf16.txt").write_bytes(_GERMAN.encode("utf-16"))
    Path("mixed", "utf32.txt").write_bytes(_GERMAN.encode("utf-32"))
    assert main(["prepare", "mixed", "--tokenizer", "tok", "--out", "o", "--json"]) == 0
    manifest = json.loads(capfd.readouterr().out)
    read = {"chats_json", "chat_json", "pairs_json", "texts_json", "lines_json"}
    read |= {"chats_jsonl", "pairs_jsonl", "table_csv"}
    assert manifest["documents"]["written"] == len(read) + 3 + len(_ARCHIVES)
    rejected = [json.loads(line) for line in Path("o/rejected.jsonl").read_text().splitlines()]
    why = {Path(one["file"]).name: one["reason"] for one in rejected}
    assert why["letter_docx.md"] == why["paper_pdf.md"] == why["random_bin.md"] == "binary"
    assert why["latin1.txt"] == "bad_utf8"
    documents = ("paper.pdf", "paper.v2.pdf", "letter.docx", "letter.odt", "novel.epub")
    assert [why[name] for name in documents] == ["unreadable"] * 5
    assert why["chats.jsonl"] == why["pairs.jsonl"] == "conversation"
    assert sum(manifest["unread_files"].values()) == sum(
        not name.endswith((".txt", ".jsonl", ".csv")) and name not in (*documents, *_ARCHIVES)
        for name in files
    )


@pytest.mark.parametrize("name", _ARCHIVES)
def test_prepare_archive_is_read_like_its_text(
    place: Path, capfd: pytest.CaptureFixture[str], files: dict[str, bytes], name: str
) -> None:
    Path(name).write_bytes(files[name])
    Path("a.txt").write_text(_ENGLISH)
    found = []
    for source in (name, "a.txt"):
        assert (
            main(["prepare", source, "--tokenizer", "tok", "--out", source + ".out", "--json"]) == 0
        )
        found.append(json.loads(capfd.readouterr().out)["splits"])
    assert found[0] == found[1]


def test_prepare_document_named_txt_is_read(place: Path) -> None:
    Path("letter.txt").write_bytes(rb"{\rtf1\ansi A letter of {\b several} words.}")
    assert main(["prepare", "letter.txt", "--tokenizer", "tok", "--out", "o"]) == 0
    shown = json.loads(Path("o/manifest.json").read_text())["splits"]
    assert sum(split["text_bytes"] for split in shown.values()) == len("A letter of several words.")


# Without a verb


def test_firstlight_without_arguments_prints_first_steps_in_eleven_lines(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert main([]) == 0
    out, err = capfdbinary.readouterr()
    lines = out.decode().splitlines()
    assert (len(lines), err) == (11, b"")
    assert max(map(len, lines)) <= 100
    assert lines[2].startswith("  firstlight train my_texts/ --budget 30m ")
    verbs = [line.split()[1] for line in lines if line.startswith("  firstlight ")]
    assert verbs == ["train", "chat", "chat", "serve", "convert", "train", "info"]


def test_firstlight_without_arguments_imports_no_torch() -> None:
    program = (
        "import sys; from firstlight.cli.main import main; main([]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("options", [[], ["--plan-only"]])
def test_train_on_texts_prints_first_line_before_importing_torch(
    place: Path, options: list[str]
) -> None:
    Path("text.txt").write_text("some words\n" * 500)
    # The first message ends the program, with 1 if torch was imported before it.
    program = (
        "import os, sys; import firstlight.console as console\n"
        "import firstlight.from_texts.run as run; import firstlight.cli.train as command\n"
        "def first(text):\n"
        "    print(text, flush=True); os._exit('torch' in sys.modules)\n"
        "run.say = command.say = console.say = first\n"
        "from firstlight.cli.main import main; main(sys.argv[1:])"
    )
    words = ["train", "text.txt", "--budget", "3m", "--model.num_hidden_layers", "3", *options]
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "reading text.txt: 1 file, 5.5 kB\n")


def test_firstlight_folder_instead_of_command_suggests_train(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("my texts").mkdir()
    assert main(["my texts"]) == 2
    assert capfd.readouterr().err == (
        "firstlight: error: my texts is not a command; "
        "to train on it: firstlight train 'my texts'\n"
    )
    assert main(["nowhere"]) == 2
    assert "No such command 'nowhere'" in capfd.readouterr().err
    assert main(["help"]) == 2
    assert "use firstlight --help or firstlight COMMAND --help" in capfd.readouterr().err

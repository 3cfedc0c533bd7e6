"""`python -m benchmarks documents`: documents with a known text, read by firstlight and by others.

SOURCES is a folder of plain-text manuals, NAME.LANGUAGE.txt or .txt.gz, with a blank line between
paragraphs. The paragraphs of prose of each manual, with headings, lists, tables and footnotes, are
turned into documents of each format by pandoc, LibreOffice (`soffice`) and Chromium, and into mails
by Python. A file or folder NAME.LANGUAGE.pdf, .epub or .html beside a manual is the same manual in
another format, made by somebody else. Its layout differs from that of the text, so only the shares
of the text's pairs of words are compared.

The other program is pdftotext for PDF, trafilatura for HTML, and pandoc for the other formats, with
the options in `other_calls`. Both programs read a document in turns, once and `1 + reads` times in
one process; the difference, in CPU time, is the time of `reads` reads without the start of a
program. Only pdftotext reads one document per process, so its time includes its start.

Each document is one line of results.jsonl. A second call in the same folder reads the documents
that are missing there.
"""

from __future__ import annotations

import contextlib
import email.message
import gzip
import io
import itertools
import json
import mailbox
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.options import DocumentsBench
from firstlight.bench.display import new_figure, png_of
from firstlight.console import say
from firstlight.errors import ConfigError
from firstlight.files.atomic import make_folder, write_file
from firstlight.hardware.device import find_hardware, machine_facts

#: A paragraph with one of these is not prose: markup, tables, code, links and items of lists.
_NOT_PROSE = re.compile(r"[─│|*`<>_~^$\[\]\\#{}]|\.\.\.|--|http|^[\d•·-]|\"|'")
#: Minimum number of characters of a paragraph, and of one in a script without spaces.
_SHORTEST, _SHORTEST_WIDE = 90, 40
#: Languages that are written without spaces, and languages that are written from right to left.
_WIDE, _RTL = ("zh", "ja"), ("ar", "fa", "he")
#: Text of the header of each page, which nobody reads as part of the text.
_HEADER = "Running header of all pages"
_SIGNATURE = "\n\n-- \nA. Sender, Example Street 1\n"
_MENU = "".join(f'<li><a href="#{n}">Menu entry {n}</a></li>' for n in range(6))
#: Kind and style of the pages that Chromium prints, by the names of their files.
_PRINTED = {
    "one": ("PDF, 1 column", "body { hyphens: auto; text-align: justify }"),
    "two": ("PDF, 2 columns", "main { column-count: 2; hyphens: auto; text-align: justify }"),
}
#: Formats into which LibreOffice converts the Word document. Its EPUBs have no lists.
_OFFICE = (
    ("ODT", "odt"), ("DOCX", "docx"), ("RTF", "rtf"), ("HTML", "html"),
    ("PDF, 1 column", "pdf"),
)  # fmt: skip
#: Marks of the layout that programs write as characters: lines of tables, bullets, the marks of
#: headings and footnotes. They are not counted for any program.
_MARKS = re.compile(r"(?m)^[ \t|:+=─-]+$|^[ \t]*(?:#+|[-•*]|\d+\.)[ \t]+|[|│]|\[\^?\d+\]:?")
#: A space that is not part of the text where two lines are joined.
_CJK = "\u2e80-\u9fff\uff00-\uffef"
_JOINED = re.compile(rf"(?<=\w-) (?=\w)|(?<=[{_CJK}]) (?=[{_CJK}])")
#: A word, or a character of a script without spaces.
_WORD = re.compile(r"[\u2e80-\u9fff]|[^\W\u2e80-\u9fff]+")
#: Programs that make or read documents.
_PROGRAMS = ("pandoc", "soffice", "chromium", "pdftotext", "trafilatura")
_READ = """
import contextlib, importlib, pathlib, sys
from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.registry import format_of
for path in map(pathlib.Path, sys.argv[1:]):
    read = importlib.import_module(format_of(path).module).read
    with contextlib.suppress(UnreadableDocument):  # A page may have no text but a menu.
        print("\\n".join(text for _, text in read(path)))
"""

Runs = Sequence[Mapping[str, Any]]


class Source(NamedTuple):
    """The text of a manual.

    Attributes:
        file: file of the manual.
        language: language in the file's name.
        markdown: the text for pandoc.
        text: the text without footnotes.
        notes: the footnotes, whose place differs between formats.
    """

    file: Path
    language: str
    markdown: str
    text: str
    notes: Sequence[str]


class Made(NamedTuple):
    """A document that was made from a source.

    Attributes:
        kind: name of the format in tables.
        path: file of the document.
        text: its text without footnotes.
        notes: its footnotes.
    """

    kind: str
    path: Path
    text: str
    notes: Sequence[str]


# The sources


def text_of(file: Path) -> str:
    """Return the text of a manual, which can be compressed."""
    content = file.read_bytes()
    return (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")


def source_of(file: Path, characters: int) -> Source:
    """Return the prose of a manual, up to a number of characters, with headings, lists, tables and
    footnotes made of its words.

    Raises:
        ConfigError: the file's name does not contain a language, or the file contains no prose.
    """
    parts = file.name.partition(".txt")[0].rsplit(".", 1)
    if len(parts) != 2:
        raise ConfigError(f"{file}: rename it to NAME.LANGUAGE.txt, such as manual.de.txt")
    language = parts[1]
    is_wide = language.startswith(_WIDE)
    found, size = [], 0
    for block in re.split(r"\n\s*\n", text_of(file)):
        paragraph = _JOINED.sub("", " ".join(block.split()))
        is_long = len(paragraph) >= (_SHORTEST_WIDE if is_wide else _SHORTEST)
        if is_long and not _NOT_PROSE.search(paragraph) and size < characters:
            found.append(unicodedata.normalize("NFC", paragraph))
            size += len(paragraph)
    if not found:
        raise ConfigError(f"{file}: no paragraph of prose, separated by blank lines")
    blocks, texts = [], []
    notes = []
    for number, paragraph in enumerate(found):
        start, end = paragraph[:24].strip(), paragraph[-24:].strip()
        marked = _escaped(paragraph)
        if number % 8 == 0:
            blocks.append(f"# {_escaped(start)}")
            texts.append(start)
        if number % 10 == 3:
            notes.append(f"{end} {number} {start}")
            marked += f"[^{len(notes)}]"
        blocks.append(marked)
        texts.append(paragraph)
        if number % 15 == 5:
            left, right = _escaped(start), _escaped(end)
            blocks.append(f"- {left}\n- {right}")
            blocks.append(f"| {left} | {right} |\n|---|---|\n| {right} | {number} |")
            texts += [start, end, f"{start} {end}", f"{end} {number}"]
    blocks += [f"[^{number}]: {_escaped(note)}" for number, note in enumerate(notes, start=1)]
    return Source(file, language, "\n\n".join(blocks), "\n\n".join(texts), notes)


def _escaped(text: str) -> str:
    """Return text in which no character is a mark of Markdown."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)


# The documents


def make_documents(source: Source, folder: Path) -> Iterator[Made]:
    """Make the documents of a source with the programs that are installed, unless they exist, and
    yield them.

    Args:
        source: the source.
        folder: folder for the documents.
    """
    make_folder(folder)
    stem = source.file.name.partition(".txt")[0]
    markdown = folder / f"{stem}.md"
    write_file(markdown, source.markdown)
    direction = "rtl" if source.language in _RTL else "ltr"
    pandoc = ["pandoc", "-f", "markdown-smart", str(markdown)]
    pandoc += [f"-Mlang={source.language}", f"-Mdir={direction}"]

    def made(kind: str, path: Path, *command: str) -> Iterator[Made]:
        if not path.exists() and shutil.which(command[0]):
            subprocess.run(command, capture_output=True, check=False)
        if path.exists():
            yield Made(kind, path, source.text, source.notes)

    for kind, suffix in (("EPUB", ".epub"), ("RTF", ".rtf"), ("notebook", ".ipynb")):
        path = folder / (stem + suffix)
        yield from made(kind, path, *pandoc, "-s", "-o", str(path))
    reference, word = folder / "reference.docx", folder / f"{stem}.docx"
    if not reference.exists() and shutil.which("pandoc"):
        _make_reference(reference)
    yield from made("DOCX", word, *pandoc, f"--reference-doc={reference}", "-o", str(word))
    for kind, suffix in _OFFICE:
        out = folder / "office"
        command = ["soffice", "--headless", "--convert-to", suffix, "--outdir", str(out), str(word)]
        yield from made(kind, out / f"{stem}.{suffix}", *command)
    body = folder / f"{stem}.body"
    for _ in made("", body, *pandoc, "-t", "html", "-o", str(body)):
        inner = body.read_text(encoding="utf-8")
        web = folder / f"{stem}.web.html"
        write_file(web, _page(inner, source.language, direction, ""))
        yield Made("HTML", web, source.text, source.notes)
        for name, (kind, css) in _PRINTED.items():
            page, pdf = folder / f"{stem}.{name}.html", folder / f"{stem}.{name}.pdf"
            write_file(page, _page(inner, source.language, direction, css))
            chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu"]
            yield from made(kind, pdf, *chromium, f"--print-to-pdf={pdf}", page.resolve().as_uri())
    yield from _make_mails(source, folder / stem)


def _make_reference(path: Path) -> None:
    """Make the Word document from which pandoc takes the header of each page."""
    command = ["pandoc", "--print-default-data-file", "reference.docx"]
    found = subprocess.run(command, capture_output=True, check=True).stdout
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    relation = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    content_type = "application/vnd.openxmlformats-officedocument.wordprocessingml.header+xml"
    reference = f'<w:headerReference xmlns:r="{relation}" w:type="default" r:id="rHead"/>'
    # Replacements in the files of the package.
    changes = {
        "word/document.xml": ("<w:sectPr />", f"<w:sectPr>{reference}</w:sectPr>"),
        "word/_rels/document.xml.rels": (
            "</Relationships>",
            f'<Relationship Id="rHead" Type="{relation}/header" Target="h.xml"/></Relationships>',
        ),
        "[Content_Types].xml": (
            "</Types>", f'<Override PartName="/word/h.xml" ContentType="{content_type}"/></Types>'
        ),
    }  # fmt: skip
    with zipfile.ZipFile(io.BytesIO(found)) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name).decode("utf-8")
            new.writestr(name, content.replace(*changes.get(name, ("\0", ""))))
        new.writestr(
            "word/h.xml",
            f'<w:hdr xmlns:w="{word}"><w:p><w:r><w:t>{_HEADER} </w:t></w:r>'
            '<w:fldSimple w:instr="PAGE"><w:r><w:t>1</w:t></w:r></w:fldSimple></w:p></w:hdr>',
        )


def _page(body: str, language: str, direction: str, css: str) -> str:
    """Return a web page around a text, with a menu, a notice and a script. A page that is printed,
    which has a style, has no menu."""
    around = ("", "") if css else (f"<nav>{_MENU}</nav>", "<footer>Accept all cookies</footer>")
    return (
        f'<!DOCTYPE html><html lang="{language}" dir="{direction}"><head><meta charset="utf-8">'
        f"<title>{_HEADER}</title><style>.footnote-back {{ display: none }} {css}</style></head>"
        f"<body>{around[0]}<main>{body}</main>{around[1]}<script>var x = 1;</script></body></html>"
    )


def _make_mails(source: Source, stem: Path) -> Iterator[Made]:
    """Write a text as one mail, and as an mbox file in which each mail quotes the one before."""
    path = stem.with_name(f"{stem.name}.eml")
    mail, head = _mail(0, source.text)
    write_file(path, mail.as_bytes())
    yield Made("mail", path, head + source.text, ())
    path = path.with_suffix(".mbox")
    path.unlink(missing_ok=True)
    paragraphs = source.text.split("\n\n")
    text = quoted = ""
    with contextlib.closing(mailbox.mbox(path)) as box:
        for number in range(0, len(paragraphs), 10):
            part = "\n\n".join(paragraphs[number : number + 10])
            mail, head = _mail(number, quoted + part + _SIGNATURE)
            box.add(mail)
            # The signature is read once.
            text += f"{head}{part}\n\n" if quoted else f"{head}{part}{_SIGNATURE}\n\n"
            quoted = f"On Mon, 02 Mar 2026, A. Sender wrote:\n\n> {paragraphs[number]}\n\n"
    yield Made("mbox", path, text, ())


def _mail(number: int, body: str) -> tuple[email.message.EmailMessage, str]:
    """Return a mail in quoted-printable encoding, and its fields as text."""
    mail = email.message.EmailMessage()
    mail["From"] = "A. Sender <a@example.org>"
    mail["Date"] = f"Mon, 02 Mar 2026 {number // 60 % 24:02}:{number % 60:02}:00 +0000"
    mail["Subject"] = f"Part {number}"
    head = "".join(f"{name}: {value}\n" for name, value in mail.items())
    mail.set_content(body, cte="quoted-printable")
    return mail, head


# Reading


def ours(paths: Sequence[Path], times: int) -> tuple[str, float]:
    """Read files several times with firstlight; return their text, and the CPU time."""
    text, seconds = _run([sys.executable, "-c", _READ, *map(str, [*paths] * times)])
    return text[: len(text) // times], seconds


def other_name(path: Path) -> str:
    """Return the program that firstlight is compared with for a document, or "" for mails."""
    names = {".pdf": "pdftotext", ".html": "trafilatura", ".eml": "", ".mbox": ""}
    return names.get(path.suffix, "pandoc")


def others(paths: Sequence[Path], times: int) -> tuple[str, float]:
    """Read files several times with the other program; return their text, and the CPU time."""
    program = other_name(paths[0])
    if program == "pandoc":
        options = ["-f", paths[0].suffix[1:], "-t", "plain", "--wrap=none", "--file-scope"]
        text, seconds = _run(["pandoc", *options, *map(str, [*paths] * times)])
        return text[: len(text) // times], seconds
    if program == "pdftotext":
        runs = [_run(["pdftotext", str(path), "-"]) for path in [*paths] * times]
        return runs[0][0], sum(seconds for _, seconds in runs)
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder, "in"))
        for number, path in enumerate([*paths] * times):
            shutil.copyfile(path, Path(folder, "in", f"{number}.html"))
        command = "trafilatura --no-comments --parallel 1 --input-dir in --output-dir out"
        _, seconds = _run(command.split(), cwd=folder)
        # The name of a text is a hash of its content, so there is one file for equal pages.
        files = sorted(Path(folder, "out").glob("*.txt"))
        return "\n".join(file.read_text("utf-8") for file in files), seconds


def _run(command: Sequence[str], cwd: str | None = None) -> tuple[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, cwd=cwd, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode:
        say(f"{command[0]}: {done.stderr.decode('utf-8', 'replace')[-200:].strip()}")
    return done.stdout.decode("utf-8", "replace"), seconds


# Comparing


def plain(text: str) -> str:
    """Return a text without marks of the layout, with one space for all white space."""
    text = unicodedata.normalize("NFC", text).replace("\u00ad", "")
    return " ".join(_MARKS.sub(" ", text).split())


def distance(left: str, right: str) -> int:
    """Return the number of characters to insert, delete or replace to turn one text into another.

    Each integer holds a column of the matrix of differences, one bit for each character of `left`
    (Myers 1999, in the form of Hyyrö 2003).
    """
    places: dict[str, int] = {}
    for index, character in enumerate(left):
        places[character] = places.get(character, 0) | 1 << index
    found = len(left)
    mask = (1 << found) - 1
    last = 1 << found >> 1
    up, down = mask, 0
    for character in right:
        same = places.get(character, 0)
        zero = (((same & up) + up) ^ up) | same | down
        higher = down | (mask & ~(zero | up))
        lower = up & zero
        found += bool(higher & last) - bool(lower & last)
        higher = higher << 1 & mask | 1
        lower = lower << 1 & mask
        up = lower | (mask & ~(zero | higher))
        down = higher & zero
    return found if left else len(right)


def share_wrong(made: Made, text: str) -> float:
    """Return the number of wrong characters of a text that was read, per character of the text. A
    footnote may stand anywhere in it, but only once."""
    expected, got = plain(made.text), plain(text)
    missing = 0
    for note in map(plain, made.notes):
        missing += 0 if note in got else len(note)
        got = " ".join(got.replace(note, "", 1).split())
    total = len(expected) + sum(map(len, map(plain, made.notes)))
    return (distance(expected, got) + missing) / total


def missing_pairs(expected: str, text: str) -> float:
    """Return the share of the pairs of words in a text that another text does not contain."""
    want, got = (
        Counter(itertools.pairwise(words))
        for words in (_WORD.findall(one.lower()) for one in (expected, text))
    )
    return (want - got).total() / want.total()


# The benchmark


def bench_documents(options: DocumentsBench) -> dict[str, Any]:
    """Read all documents that are not in results.jsonl, and return {"machine", "runs"}.

    Raises:
        ConfigError: the folder of sources contains no manual, or a manual can't be used.
    """
    sources = sorted(Path(options.sources).glob("*.txt*"))
    if not sources:
        raise ConfigError(f"{options.sources}: no manuals NAME.LANGUAGE.txt or .txt.gz in it")
    if missing := [name for name in _PROGRAMS if not shutil.which(name)]:
        say(f"not installed: {', '.join(missing)}; their documents and figures are left out")
    path = options.folder / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    known = {(run["kind"], run["document"]) for run in found}

    documents = options.folder / "documents"
    for file in sources:
        source = source_of(file, options.characters)
        jobs: list[tuple[str, str, Path, Callable[[str], float]]] = [
            (
                made.kind,
                str(made.path.relative_to(documents)),
                made.path,
                partial(share_wrong, made),
            )
            for made in make_documents(source, documents)
        ]
        beside = sorted(file.parent.glob(f"{file.name.partition('.txt')[0]}.*"))
        for manual in (one for one in beside if one.suffix in (".pdf", ".epub", ".html")):
            kind = f"manual, {manual.suffix[1:].upper()}"
            jobs.append((kind, manual.name, manual, partial(missing_pairs, text_of(file))))
        for kind, name, document, score in jobs:
            if (kind, name) in known:
                continue
            run = {"kind": kind, "document": name, "language": source.language}
            run |= measure(document, score, options)
            found.append(run)
            write_file(path, "".join(json.dumps(one) + "\n" for one in found))
            wrong = (f"{run[key]:.2%}" for key in ("wrong", "other_wrong") if key in run)
            say(f"{kind}, {name}: {', '.join(wrong)} wrong")
    return {"machine": machine_facts(find_hardware("auto")), "runs": found}


def measure(path: Path, score: Callable[[str], float], options: DocumentsBench) -> dict[str, Any]:
    """Read a document, or a folder of web pages, with both programs in turns.

    Args:
        path: the document.
        score: function from the text that was read to the share of it that is wrong.
        options: turns, and reads per turn.

    Returns:
        "bytes" of the document; "other": the other program; "wrong", "other_wrong";
        "seconds", "other_seconds": CPU time of a read in each turn.
    """
    pages = sorted(path.glob("*.html")) if path.is_dir() else [path]
    other = other_name(pages[0])
    readers = {"": ours} | ({"other_": others} if other and shutil.which(other) else {})
    found: dict[str, Any] = {"bytes": sum(page.stat().st_size for page in pages), "other": other}
    for turn in range(options.turns):
        for name, reader in readers.items():
            text, once = reader(pages, 1)
            _, many = reader(pages, 1 + options.reads)
            if not turn:
                found[f"{name}wrong"] = score(text)
            # A clock of 1 ms can give equal times for short documents.
            seconds = max(many - once, 1e-3) / options.reads
            found.setdefault(f"{name}seconds", []).append(seconds)
    return found


# The table and the picture


def document_table(runs: Runs) -> list[list[str]]:
    """Return the header and a row for each format. The column of a language has the largest share
    of any document in percent that is wrong with firstlight and with the other program: characters,
    or for manuals pairs of words. MB/s are bytes of all documents per CPU second."""
    languages = sorted({run["language"] for run in runs})
    rows = [["wrong in %", "files", *languages, "MB/s", "other program"]]
    for kind in sorted({run["kind"] for run in runs}):
        group = [run for run in runs if run["kind"] == kind]
        cells = []
        for language in languages:
            few = [run for run in group if run["language"] == language]
            cells.append(_pair(few, "wrong", lambda found, key: 100 * max(x[key] for x in found)))
        speed = _pair(group, "seconds", _megabytes_per_second)
        rows.append([kind, str(len(group)), *cells, speed, group[0]["other"]])
    return rows


def _pair(runs: Runs, key: str, figure: Callable[[Runs, str], float]) -> str:
    """Return the figures of firstlight and of the other program, if there is one."""
    measured = {name: [run for run in runs if name in run] for name in (key, f"other_{key}")}
    return "/".join(f"{figure(few, name):.2f}" for name, few in measured.items() if few)


def _megabytes_per_second(runs: Runs, key: str) -> float:
    seconds = sum(statistics.median(run[key]) for run in runs)
    return float(sum(run["bytes"] for run in runs) / seconds / 1e6)


def draw(result: Mapping[str, Any]) -> bytes:
    """Draw the largest share of wrong characters of each format as PNG bytes."""
    figure = new_figure(9, 4)
    axes = figure.subplots()
    runs = [run for run in result["runs"] if not run["kind"].startswith("manual")]
    kinds = sorted({run["kind"] for run in runs}, reverse=True)
    for key, shift, label in (("wrong", 0.2, "firstlight"), ("other_wrong", -0.2, "other program")):
        shares = [[run.get(key, 0.0) for run in runs if run["kind"] == kind] for kind in kinds]
        values = [100 * max(few) for few in shares]
        axes.barh([n + shift for n in range(len(kinds))], values, 0.4, label=label)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel("wrong characters in %, worst document")
    axes.set_xscale("symlog", linthresh=0.1)
    axes.legend(frameon=False)
    return png_of(figure)

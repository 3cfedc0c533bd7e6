"""Tests that document separators in texts are distinguished from mentions of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.data.cleaning import ChangeCounts, change_lines, cleaned, split_documents

_END = "<|endoftext|>"


def documents(text: str, size: int = 1 << 20, *, is_code: bool = False) -> list[str]:
    content = text.encode()
    blocks = [content[place : place + size] for place in range(0, len(content), size)]
    found = split_documents(blocks, is_code=is_code)
    return [part.content.decode() for part in found if part.content is not None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"One.\n{_END}\nTwo.\n", ["One.", "Two."]),
        (f"One.\r\n\r\n{_END}\r\n\r\nTwo.", ["One.", "Two."]),
        (f"THE END{_END}The next", ["THE END", "The next"]),
        (f'"Bye!"{_END}"Hello," she said', ['"Bye!"', '"Hello," she said']),
        (f"Tea? {_END} In the", ["Tea?", "In the"]),
        (f"One.{_END} two", ["One.", "two"]),
        (f"first line {_END}\nsecond line {_END}\n", ["first line", "second line"]),
        (f"\u7d42\u3002{_END}\u59cb", ["\u7d42\u3002", "\u59cb"]),
        (f"{_END}One.{_END}{_END}Two.{_END}", ["One.", "Two."]),
        ("<|begin_of_text|>a<|end_of_text|><|begin_of_text|>b<|end_of_text|>", ["a", "b"]),
        ("<s>\na\n</s>\n<s>\nb\n</s>\n", ["a", "b"]),
        ("a\n<eos>\nb\n<\uff5cend\u2581of\u2581sentence\uff5c>\nc", ["a", "b", "c"]),
        (f"\n{_END}\n", [""]),
    ],
)
def test_clean_separators_between_texts_split_documents(text: str, expected: list[str]) -> None:
    assert documents(text) == expected
    assert documents(text, 5) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"eos = '{_END}'",
        f'f"{_END}" + text',
        f'{{"{_END}": 50256}}',
        f"the token `{_END}` ends",
        f"eos_token: {_END}\n",
        f"- {_END}\n",
        f"GPT-2 has {_END} as its end",
        f"It ends. {_END} tells the model so",
        f"'Hello{_END}'",
        "some <s>struck</s> words",
    ],
)
def test_clean_mentions_of_separators_stay_text(text: str) -> None:
    (part,) = split_documents([text.encode()])
    assert part.content == text.encode()
    assert part.changes[0].startswith("kept <")


def test_clean_code_splits_documents_only_at_separator_on_own_line() -> None:
    code = f'x = "a.{_END}b"\n{_END}\ny = 1\n'
    assert documents(code, is_code=True) == [f'x = "a.{_END}b"', "y = 1"]


_PIECES = st.sampled_from([_END, "</s>", "\n", " ", "a", "B.", '"', "word " * 20, "<", "<|end"])


@given(st.lists(_PIECES, max_size=14).map("".join), st.integers(1, 100))
def test_clean_documents_do_not_depend_on_block_size(text: str, size: int) -> None:
    assert documents(text, size) == documents(text)


def test_clean_too_long_document_is_skipped_alone() -> None:
    text = f"a\n{_END}\n{'b' * 100}\n{_END}\nc".encode()
    blocks = [text[place : place + 10] for place in range(0, len(text), 10)]
    found = [(part.line, part.content) for part in split_documents(blocks, 50)]
    assert found == [(1, b"a"), (2, None), (5, b"c")]


def test_clean_changes_are_counted_by_document_and_file() -> None:
    assert cleaned("a\r\nb") == ("a\nb", ("crlf",))
    header = "*** START OF THE PROJECT GUTENBERG EBOOK A ***"
    assert cleaned(f"{header}\r\na\n") == ("a\n", ("crlf", "gutenberg"))
    assert cleaned(f"{header}\na\n", is_code=True)[1] == ()
    counts = ChangeCounts()
    for origin, changes in (("a", (_END, "crlf")), ("a", (_END,)), ("b", ("crlf",))):
        counts.add(origin, changes)
    counts.add("c", (f"kept {_END}",))
    assert list(change_lines(counts.record(), counts.names())) == [
        f"a: 2 documents, separated by {_END} (--as-is treats it as text)",
        "2 files: CRLF line endings replaced with LF (--as-is keeps them)",
        f"c: {_END} that is not between documents is treated as plain text",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "1\r\n00:00:01,000 --> 00:00:02,500\r\nHello,\r\n42\r\n\r\n"
            "2\r\n00:00:03,000 --> 01:00:04,000\r\nBye.\r\n",
            "Hello,\n42\nBye.\n",
        ),
        (
            "WEBVTT\nKind: captions\n\n00:01.000 --> 00:02.000 align:start\nHi.\n\n"
            "last\n100:00:02.000 --> 100:00:03.500\nBye.",
            "Hi.\nBye.\n",
        ),
        ("1\n00:00:01,000 --> 00:00:02,500\n\n", ""),
        (
            "1\n00:00:01,000 --> 00:00:02,500\n{\\an8}<i>One</i> &amp; "
            "<font color='#f'>two</font>,\n<3 and a < b > c, <whispers>\n",
            "One & two,\n<3 and a < b > c, <whispers>\n",
        ),
        (
            "WEBVTT\n\nSTYLE\n::cue { color: red }\n\nNOTE\na comment\n\n1\n"
            "00:01.000 --> 00:02.000\n<v.loud Bob B>NOTE&nbsp;this</v> "
            "<c.x>one<00:00:01.500></c>\n",
            "Bob B: NOTE this one\n",
        ),
        # Captions of YouTube show each line in three cues.
        (
            "WEBVTT\n\n00:00.000 --> 00:02.000 align:start\n \nhi<00:00:00.500><c> all</c>\n\n"
            "00:02.000 --> 00:02.010\nhi all\n \n\n00:02.010 --> 00:04.000\n"
            "hi all\nno<c> no</c>\n\n00:04.000 --> 00:04.010\nno no\n \n",
            "hi all\nno no\n",
        ),
        (
            "1\n00:00:01,000 --> 00:00:02,000\nNo!\n\n2\n00:00:02,000 --> 00:00:03,000\nNo!\n\n"
            "3\n00:00:03,000 --> 00:00:04,000\nYes!\n",
            "No!\nNo!\nYes!\n",
        ),
        # This would take hours if the search started at each blank line.
        ("Hi." + "\n" * 10**6 + "1\n00:00:01,000 --> 00:00:02,500\nBye.\n", "Hi.\nBye.\n"),
    ],
)
def test_clean_subtitles_keeps_what_a_viewer_reads(text: str, expected: str) -> None:
    found, changes = cleaned(text, is_subtitles=True)
    assert (found, changes[-1]) == (expected, "subtitles")
    assert "-->" in cleaned(text)[0]
    (line,) = change_lines({"subtitles": {"documents": 1, "files": 1}}, {"subtitles": "a.srt"})
    assert line == "a.srt: numbers, times and tags of subtitles removed (--as-is keeps them)"

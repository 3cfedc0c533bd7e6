"""Tests of the scan of a corpus: counts, near-duplicates, and a split that keeps near-duplicates
together.
"""

from __future__ import annotations

import gzip
import lzma
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.data.corpus import TokenDataset
from firstlight.data.prepare import prepare
from firstlight.data.records import read_documents
from firstlight.data.sources import DataSource, find_sources, limited_sources
from firstlight.errors import InputError
from firstlight.from_texts.held_out import (
    HELD_OUT_BYTES,
    NearDuplicates,
    held_out_groups,
    hold_out,
    similarity,
    sketch,
)
from firstlight.from_texts.preparation import train_tokenizer_on
from firstlight.from_texts.scan import GzipSample, Scan, described, opening_of, scan_corpus
from firstlight.tokenizer import train_tokenizer


def prose(seed: int, words: int = 300) -> str:
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(words))


def scanned(folder: Path, *texts: str) -> Scan:
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return scan_corpus(find_sources([folder]))


def test_scan_counts_facts_of_corpus(tmp_path: Path) -> None:
    facts = scanned(tmp_path, "ab\n", "ab\n", "кот", "한국어", "").facts
    assert (facts.documents, facts.duplicates, facts.rejected) == (4, 1, {"empty": 1})
    assert (facts.text_bytes, facts.characters) == (3 + 6 + 9, 9)
    assert facts.scripts == {"Hangul": 9 / 17, "Cyrillic": 6 / 17, "Latin": 2 / 17}
    assert not facts.is_sampled
    assert facts.total_bytes == facts.text_bytes


def test_scan_reports_unread_and_uncompared_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.from_texts.scan.NearDuplicates", lambda: NearDuplicates(most=2))
    scan = scanned(tmp_path, prose(1), prose(2), prose(3), *("  ",) * 7)
    lines = list(described(scan))
    assert lines[1].startswith("only the first 2 documents were searched for near-duplicates: ")
    empty = f"7 documents, empty or only whitespace; first: {tmp_path}/003.txt:1"
    assert lines[2:] == [f"left out: {empty}"]


def test_scan_key_depends_only_on_text(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, text in zip(folders, ("one", "one", "two"), strict=True):
        folder.mkdir()
        (folder / "text.txt").write_text(text)
    keys = [scan_corpus(find_sources([folder])).facts.content_key for folder in folders]
    assert keys[0] == keys[1] != keys[2]


def test_scan_without_text_raises_with_first_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("  \n")
    with pytest.raises(InputError, match=r"corpus is empty: .*a\.txt:1: empty"):
        scan_corpus(find_sources([tmp_path]))


def test_near_duplicates_are_documents_differing_in_few_words() -> None:
    words = prose(1).split()
    words[100] = words[200] = "changed"
    found = NearDuplicates()
    assert [found.add(text) for text in (prose(1), prose(2), " ".join(words).upper())] == [
        *(False, False, True)
    ]
    assert found.groups == [0, 1, 0]
    assert similarity(sketch(prose(1)), sketch(prose(2))) == 0.0


def test_held_out_groups_exclude_documents_joined_by_another() -> None:
    # One third of the last document occurs in both of the first two documents, and each of the
    # other thirds in one of them.
    one, other = (f"{prose(0)} {prose(seed)}" for seed in (1, 2))
    found = NearDuplicates()
    texts = [prose(seed) for seed in range(3, 30)]
    assert not any(found.add(text) for text in (one, other, *texts))
    assert found.add(f"{one} {prose(2)}")
    assert found.bridged == {0, 1}
    groups = range(40)
    assert held_out_groups(groups, [1] * 40) == [1, 11, 21, 31]
    assert held_out_groups(groups, [1] * 40, {1, 11}) == [2, 12, 21, 31]


def test_scan_reports_similar_documents_held_out_together(tmp_path: Path) -> None:
    texts = [prose(seed) for seed in range(30)]
    # The second document is held out, together with a later document that is similar to it.
    scan = scanned(tmp_path, *texts, f"{texts[1]} and more")
    split_of = scan.split.splitter()
    assert [split_of(text) for text in (texts[1], f"{texts[1]} and more")] == ["val", "val"]
    line = "1 held-out document resembles an earlier one: gzip and xz benefit from the common parts"
    assert list(described(scan))[2].startswith(line)
    (tmp_path / "030.txt").unlink()
    assert line not in "\n".join(described(scan_corpus(find_sources([tmp_path]))))


def test_scan_ends_of_similar_documents_are_not_held_out(tmp_path: Path) -> None:
    texts = [prose(seed) for seed in range(5)]
    longer = texts[0] + " " + prose(9, 60)
    scan = scanned(tmp_path, *texts, longer)
    assert scan.split.digests is None
    split_of = scan.split.splitter()
    assert [split_of(text) for text in (*texts, longer)] == ["train", *["tail"] * 4, "train"]
    line = "1 near-duplicate: kept in the same split as the documents they resemble"
    assert list(described(scan))[1] == line


def test_scan_ends_of_documents_joined_by_another_are_not_held_out() -> None:
    found = NearDuplicates()
    found.groups, found.bridged = [0, 1, 2, 3, 4, 0], {0, 1}
    held = hold_out(found, {bytes([number]): 10 for number in range(6)})
    assert held.digests is None
    assert held.whole == {b"\0", b"\1", b"\5"}


def test_scan_reports_similar_documents_on_both_sides(tmp_path: Path) -> None:
    scan = scanned(tmp_path, prose(0), prose(0) + " and more")
    assert scan.split.splitter()(prose(0)) == "tail"
    line = "1 near-duplicate: parts of them may be in both the training and the validation split"
    assert list(described(scan))[1] == line


def test_scan_given_validation_texts_are_held_out_and_not_trained_on(tmp_path: Path) -> None:
    for folder, seeds in (("texts", range(8)), ("held", (3, 20))):
        (tmp_path / folder).mkdir()
        for seed in seeds:
            (tmp_path / folder / f"{seed}.txt").write_text(prose(seed))
    (tmp_path / "texts" / "similar.txt").write_text(prose(20) + " and more")
    sources, held = (find_sources([tmp_path / name]) for name in ("texts", "held"))
    scan = scan_corpus(sources, val_sources=held)
    split_of = scan.split.splitter()
    splits = [split_of(record.value) for record in read_documents(scan.limited(10**9))]
    assert splits == ["val", "val", *("train",) * 3, None, *("train",) * 4, None]
    assert scan.val_bytes == pytest.approx(len(prose(3) + prose(20)), abs=1)
    assert all(any(one in prose(seed) for seed in (3, 20)) for one in scan.prompts)
    lines = "\n".join(described(scan))
    assert "validation: 2 documents from --val-input" in lines
    assert "left out: 1 near-duplicate of the validation text" in lines
    assert scan.facts.content_key != scan_corpus([*held, *sources]).facts.content_key


def test_scan_long_text_file_does_not_keep_documents_at_scan_limit(
    tmp_path: Path,
) -> None:
    stories = "".join(f"{prose(seed, 100) * 30}\n<|endoftext|>\n" for seed in range(100))
    (tmp_path / "a.txt").write_text(stories)
    scan = scan_corpus(find_sources([tmp_path]), most_bytes=len(stories) // 2)
    assert scan.facts.is_sampled
    assert scan.split.digests
    assert scan.held_out_files == []
    assert len(list(read_documents(scan.limited(10**9)))) == 100


def test_scan_reads_texts_after_file_without_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n' * 3000)
    (tmp_path / "b.txt").write_text(prose(1))
    facts = scan_corpus(find_sources([tmp_path])).facts
    assert facts.documents == 1
    assert facts.rejected["conversation"] == 3000


def test_scan_partly_read_compressed_texts_are_held_out_whole(tmp_path: Path) -> None:
    for number in range(60):
        data = gzip.compress(prose(number, 2000).encode())
        (tmp_path / f"{number:02}.txt.gz").write_bytes(data)
    sources = find_sources([tmp_path])
    scan = scan_corpus(sources)
    split_of = scan.split.splitter()
    some = limited_sources(sources, 700_000)
    assert 5 < len(some) < 55
    splits = [split_of(record.value) for record in read_documents(some)]
    assert 0 < splits.count("val") < splits.count("train") == len(some) - splits.count("val")


@pytest.mark.parametrize("whole_bytes", [1 << 20, 1000])
@pytest.mark.parametrize("ending", [".txt", ".txt.gz"])
def test_scan_held_out_texts_are_excluded_from_any_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, whole_bytes: int
) -> None:
    monkeypatch.setattr("firstlight.data.sources._WHOLE_BYTES", whole_bytes)
    for number in range(60):
        data = prose(number, 2000).encode()
        path = tmp_path / f"{number:02}{ending}"
        path.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)
    sources = find_sources([tmp_path])
    # With 1000 bytes as the limit for small files, the scan reads only a part of each file.
    scan = scan_corpus(sources, most_bytes=500_000)
    assert scan.split.digests
    for most_bytes in (100_000, 300_000, 10_000_000):
        split_of = scan.split.splitter()
        splits = [split_of(one.value) for one in read_documents(scan.limited(most_bytes))]
        assert splits.count("val") == len(scan.split.digests)
        assert splits.count("train") == len(splits) - splits.count("val") > 0
    texts: list[str] = []

    def train(found: Iterable[str], vocab_size: int) -> Any:
        texts.extend(found)
        return train_tokenizer([prose(0)], vocab_size)

    monkeypatch.setattr("firstlight.tokenizer.train_tokenizer", train)
    monkeypatch.setattr("firstlight.from_texts.preparation._TOKENIZER_BYTES", 100_000)
    train_tokenizer_on(scan, "text", 300, lambda message: None)
    held = {one.value[:50] for one in read_documents(scan.held_out_files)}
    assert len(held) == len(scan.split.digests)
    assert texts
    assert not held & {text[:50] for text in texts}


def test_similarity_estimates_share_of_common_shingles() -> None:
    common, estimates = prose(0, 600), []
    for seed in range(1, 20):
        estimates.append(similarity(sketch(common), sketch(common + " " + prose(seed, 600))))
    assert sum(estimates) / len(estimates) == pytest.approx(0.5, abs=0.1)


def test_near_duplicate_search_has_bounded_memory() -> None:
    found = NearDuplicates(most=1)
    assert [found.add(prose(1)), found.add(prose(1))] == [False, False]
    assert (found.compared, len(found.groups)) == (1, 2)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400)), max_size=120))
def test_split_keeps_duplicate_groups_on_one_side(documents: list[tuple[int, int]]) -> None:
    groups, sizes = [group for group, _ in documents], [size for _, size in documents]
    held = held_out_groups(groups, sizes)
    if held is None:
        return
    kept = set(range(len(groups))) - set(held)
    assert not {groups[n] for n in held} & {groups[n] for n in kept}
    assert 0.05 * sum(sizes) <= sum(sizes[n] for n in held) <= 0.2 * sum(sizes)


def test_held_out_groups_of_few_documents_returns_none() -> None:
    assert held_out_groups([0, 0, 2], [5, 5, 5]) is None
    # A single document makes up most of the text.
    assert held_out_groups(range(12), [100_000, *[10] * 11]) is None


def test_split_of_large_corpus_holds_out_smaller_share() -> None:
    sizes = [10_000] * 10_000
    held = held_out_groups(range(len(sizes)), sizes)
    assert held is not None
    assert sum(sizes[n] for n in held) == pytest.approx(HELD_OUT_BYTES, rel=0.02)


def test_prepared_shards_use_split_of_scan(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [prose(seed) for seed in range(29)]
    scan = scanned(folder, *texts, texts[3])
    tokenizer = train_tokenizer(texts, 300)
    manifest = prepare(
        scan.sources,
        tokenizer,
        tmp_path / "data",
        val_fraction=scan.split.fraction,
        split_of=scan.split.splitter(),
    )
    held = scan.split.digests
    assert held is not None
    assert manifest["splits"]["val"]["documents"] == len(held)
    assert manifest["documents"]["rejected"] == {"duplicate": 1}
    val = TokenDataset(tmp_path / "data", "val")
    first = tokenizer.decode(list(map(int, val[0 : val.num_tokens])))
    assert first.startswith(scan.prompts[0])


def test_scan_reports_gzip_and_xz_bits_per_byte(tmp_path: Path) -> None:
    text = prose(1, 3000)
    facts = scanned(tmp_path, text).facts
    data = text.encode()
    assert facts.gzip_bits_per_byte == 8 * len(gzip.compress(data, 9)) / len(data)
    # Computed from the pieces of the training text, in a different order.
    xz = 8 * len(lzma.compress(data)) / len(data)
    assert facts.hardness.xz_bits_per_byte == pytest.approx(xz, rel=0.15)


def test_scan_gzip_of_long_text_is_estimated_from_its_whole_length(tmp_path: Path) -> None:
    letters = bytes(b"etaoinsh"[code % 8] for code in range(256))
    varied = random.Random(1).randbytes(3 << 20).translate(letters)
    documents = [
        b"the same line\n" * 150_000,
        *(varied[at : at + 9999] for at in range(0, len(varied), 9999)),
    ]
    sample = GzipSample()
    for document in documents:
        sample.add(document)
    text = b"".join(documents)
    assert len(text) > 5_000_000
    bits_per_byte = 8 * len(gzip.compress(text, 9)) / len(text)
    assert sample.bits_per_byte() == pytest.approx(bits_per_byte, rel=0.03)
    scan = scanned(tmp_path, prose(1, 3000))
    facts = replace(scan.facts, text_bytes=len(text), gzip_bits_per_byte=1.234)
    (line,) = described(replace(scan, facts=facts))
    assert line.endswith("; compressed with gzip -9: about 1.23 bits per byte")


def test_scan_single_text_is_split_at_its_end(tmp_path: Path) -> None:
    scan = scanned(tmp_path, prose(1, 3000))
    assert scan.split.digests is None
    assert scan.split.splitter()("anything") == "tail"
    assert len(scan.prompts) == 3
    assert all(one in prose(1, 3000)[-2000:] for one in scan.prompts)


@pytest.mark.parametrize("documents", [10, 19, 20])
def test_scan_few_held_out_documents_still_give_three_prompts(
    tmp_path: Path, documents: int
) -> None:
    texts = [prose(seed, 300) for seed in range(documents)]
    scan = scanned(tmp_path, *texts)
    split_of = scan.split.splitter()
    held = [text for text in texts if split_of(text) == "val"]
    assert 0 < len(held) < 3
    assert len(scan.prompts) == 3
    assert all(any(prompt in text for text in held) for prompt in scan.prompts)
    assert all(any(text.startswith(prompt) for prompt in scan.prompts) for text in held)


def test_scan_prompts_exclude_texts_whose_end_is_trained_on(tmp_path: Path) -> None:
    texts = [prose(seed, 300) for seed in range(6)]
    scan = scanned(tmp_path, *texts, "a new opening " + texts[0])
    assert scan.split.digests is None
    assert len(scan.split.whole) == 2
    assert len(scan.prompts) == 3
    assert all(any(prompt in text for text in texts[1:]) for prompt in scan.prompts)


def test_scan_large_corpus_reads_first_part_of_each_file(tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "{prose(seed, 20)}"}}\n' for seed in range(100))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(lines)
    sources = find_sources([tmp_path])
    facts = scan_corpus(sources, most_bytes=len(lines) // 2).facts
    assert facts.is_sampled
    assert facts.total_bytes == 2 * len(lines)
    assert facts.text_bytes == pytest.approx(len(lines) / 4, rel=0.1)
    assert facts.duplicates == facts.documents // 2


def test_limited_sources_dataset_is_limited_in_bytes() -> None:
    sources = [DataSource("hf:some", dataset="some")]
    assert [one.most_bytes for one in limited_sources(sources, 1000)] == [1000]


@given(st.text(), st.integers(0, 3))
def test_opening_of_returns_short_part_of_text(text: str, start: int) -> None:
    assert opening_of(text, start) in text
    assert len(opening_of(text, start)) <= 60


def test_limited_sources_read_short_files_whole_and_lines_of_long_ones(
    tmp_path: Path,
) -> None:
    for number in range(50):
        (tmp_path / f"{number:02}.txt").write_text(f"{number} " + "word " * 2000)
    sources = find_sources([tmp_path])
    limited = limited_sources(sources, 100_000)
    assert [source.name for source in limited][:2] == [sources[0].name, sources[6].name]
    texts = [record.value for record in read_documents(limited)]
    assert 90_000 <= sum(map(len, texts)) <= 110_000
    assert {len(text) for text in texts} <= {10_002, 10_003}
    # A limit applies only to the call for which it was set.
    assert len(limited_sources(scan_corpus(sources, most_bytes=100_000).sources, 10**7)) == 50
    long = tmp_path / "long"
    long.mkdir()
    (long / "a.txt").write_text("é" * 1000 + "\n" + "b" * 1000, encoding="utf-8")
    (source,) = find_sources([long])
    for limit, expected in ((2500, "é" * 1000 + "\n"), (1001, "é" * 500), (5000, None)):
        (record,) = read_documents([replace(source, most_bytes=limit)])
        assert record.value == expected or (expected is None and len(record.value) == 2001)


def test_scan_source_without_text_field_is_not_read_to_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"content": "a text"}\n' * 5000)
    (source,) = find_sources([path])
    assert sum(1 for _ in read_documents([replace(source, most_bytes=50_000)])) == 50
    with pytest.raises(InputError, match="all 5,000 documents read were rejected"):
        scan_corpus([source])


def test_scan_reads_texts_after_many_bad_lines(tmp_path: Path) -> None:
    lines = "{bad\n" * 1500 + "".join(f'{{"text": "{prose(one)}"}}\n' for one in range(20))
    (tmp_path / "a.jsonl").write_text(lines)
    facts = scan_corpus(find_sources([tmp_path])).facts
    assert (facts.documents, facts.rejected) == (20, {"broken_json": 1500})


def test_find_sources_ignores_files_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    (run / "data").mkdir(parents=True)
    for name in ("recipe.yaml", "metrics.jsonl", "samples.jsonl", "data/rejected.jsonl"):
        (run / name).write_text('{"text": "a sample"}\n')
    (tmp_path / "a.txt").write_text("a text")
    assert [source.path for source in find_sources([tmp_path])] == [tmp_path / "a.txt"]


def test_scan_text_of_one_repeated_character_raises_with_cause(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("b" * 20_000 + "\n")
    with pytest.raises(InputError, match=r"100\.0% of the text is the single character 'b'"):
        scan_corpus(find_sources([tmp_path / "a.txt"]))
    (tmp_path / "a.txt").write_text("b\n" * 10_000)
    assert scan_corpus(find_sources([tmp_path / "a.txt"])).facts.common_characters == 2

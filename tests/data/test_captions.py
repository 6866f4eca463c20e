import json
import unicodedata
from collections import Counter

import ftfy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvision.data.caption_files import CaptionFile
from dpvision.data.captions import (
    MAX_CAPTION_CHARS,
    MAX_TEXT_BYTES,
    clean_caption,
    decode_text,
    find_captions,
)
from dpvision.data.sources import Sample
from dpvision.errors import DataError

from .image_files import png, write_folder

# --- cleaning
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("  a  dog\truns \r\n fast ", "a dog runs fast"),
        ("a\x00 d\x07og\x1b[31m \x7fruns", "a dog runs"),
        ("\ufeffa \u202edog\u2066 r\u00aduns\u200b", "a dog runs"),
        ("una niÃ±a", "una niña"),  # UTF-8 read as Windows-1252 by somebody before us
        ("cats &amp; dogs &quot;here&quot;", 'cats & dogs "here"'),
        ("a “dog”", 'a "dog"'),
        ("A Dog", "A Dog"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("👩\u200d🔬", "👩\u200d🔬"),
        ("\ud83d\ude00 \ud800", "😀 \ufffd"),
        (" \n\t \x00 \u200b", ""),
        ("", ""),
    ],
)
def test_what_a_caption_becomes(raw, clean):
    assert clean_caption(raw) == clean


@given(st.text(st.characters()))
@settings(max_examples=500, deadline=None)
def test_a_clean_caption_holds_no_controls_and_no_spare_blanks_and_fits(raw):
    clean = clean_caption(raw)
    assert len(clean) <= MAX_CAPTION_CHARS
    assert clean == " ".join(clean.split())
    assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in clean)
    clean.encode()  # no half characters


@given(st.text(st.characters(max_codepoint=127)))
@settings(max_examples=500, deadline=None)
def test_ascii_that_is_not_shown_to_ftfy_would_not_have_been_changed_by_it(raw):
    text = "".join(c for c in raw if c.isprintable() and c != "&")
    assert ftfy.fix_text(text) == text


@given(
    st.lists(
        st.sampled_from(["a", "dog", "Hündin", "supercalifragilistic", "x" * 70]),
        min_size=1,
        max_size=900,
    )
)
@settings(max_examples=100, deadline=None)
def test_the_cap_cuts_between_words(words):
    kept = clean_caption(" ".join(words)).split()
    assert kept == words[: len(kept)]
    if len(kept) < len(words):
        assert len(" ".join(kept)) <= MAX_CAPTION_CHARS < len(" ".join(words[: len(kept) + 1]))


def test_ten_thousand_words_and_one_endless_word_are_cut_and_counted():
    long = "a brown dog & a cat " * 2000
    found = find_captions({"captions": [long, "x" * 10_000_000, "short", "y " * 5_000_000]})
    assert [len(c) <= MAX_CAPTION_CHARS for c in found.kept] == [True] * 4
    assert found.num_cut == 3
    assert long.startswith(found.kept[0]) and len(found.kept[0]) > MAX_CAPTION_CHARS - 20


def test_captions_that_are_one_once_cleaned_are_merged():
    found = find_captions(
        {
            "captions": ["a dog", " a  dog ", "a\x00 dog", "A dog"],
            "caption": "a cat",
            "text": "a dog",
        }
    )
    assert found.kept == ("a dog", "A dog", "a cat")
    assert not found.dropped


def test_what_is_no_caption_is_counted_by_reason_and_raises_nothing():
    latin = "läuft".encode("cp1252")
    found = find_captions(
        {
            "captions": ["", " ", None, 7, {"raw": "x"}, latin, b"ok", b"x" * (MAX_TEXT_BYTES + 1)],
            "caption": None,
            "text": 3.5,
        }
    )
    assert found.kept == ("ok",)
    assert found.dropped == Counter(
        {"no text": 4, "empty": 2, "another encoding": 1, "oversized": 1}
    )
    assert find_captions({}) == ((), 0, Counter(), ())


# --- encodings
# --------------------------------------------------------------------------------------------------

TEXTS = [
    "a dog runs",
    "ein Hund läuft",
    "пёс бежит",
    "бежит",
    "τρέχει",
    "ο σκύλος τρέχει",
    "犬が走る",
    "कुत्ता दौड़ता है",
    "😀",
]


@pytest.mark.parametrize("text", TEXTS)
def test_unicode_is_read_with_and_without_its_mark(text):
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert decode_text(text.encode(encoding)) == text
    for mark, encoding in (
        ("\ufeff", "utf-16-be"),
        ("\ufeff", "utf-16-le"),
        ("\ufeff", "utf-32-be"),
        ("\ufeff", "utf-32-le"),
    ):
        assert decode_text((mark + text).encode(encoding)) == text


@pytest.mark.parametrize(
    "encoding",
    [
        "cp1252",
        "cp1250",
        "cp1251",
        "koi8-r",
        "cp1253",
        "shift_jis",
        "gb18030",
        "iso2022_jp",
        "utf-16-le",
        "utf-16-be",
    ],
)
def test_another_encoding_is_refused_never_garbled(encoding):
    """Whatever of these the file was written in, the answer is its text or none."""
    written = {
        text: data
        for text in TEXTS
        if (data := text.encode(encoding, "ignore")).decode(encoding) == text
    }
    assert written
    for text, data in written.items():
        same = text.isascii() and not encoding.startswith("utf-16")
        assert decode_text(data) == (text if same else None)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
@settings(deadline=None)
def test_utf_8_and_marked_utf_16_are_never_lost(text):
    text = text.removeprefix("\ufeff")
    assert decode_text(text.encode()) == text
    assert decode_text(text.encode("utf-16")) == text


def test_damaged_unicode_is_refused():
    for data in (b"\xff\xfea", b"\xff\xfe\x00\xd8", b"a\xc3", b"a\x00b\x00", b"\x1b$B8$\x1b(B"):
        assert decode_text(data) is None
    assert decode_text(b"") == ""
    assert decode_text(b"one bell \x07 in a long line is no other encoding") is not None


# --- files of captions
# --------------------------------------------------------------------------------------------------

COCO = {
    "images": [
        {"id": 7, "file_name": "a.jpg"},
        {"id": 8, "file_name": "b.jpg"},
        {"id": 9, "file_name": "gone.jpg"},
    ],
    "annotations": [
        {"image_id": 8, "caption": "b one"},
        {"image_id": 7, "caption": "a one"},
        {"image_id": 8, "caption": "b two"},
        {"image_id": 9, "caption": "nobody"},
        {"image_id": 99, "caption": "nobody"},
    ],
}
TOKENS = (
    "b.jpg#0\tb one\na.jpg#0\ta one\r\nb.jpg#1\tb two\n\ngone.jpg#0\tnobody\nimage 99\tnobody\n"
)
TABLE = (
    'image,caption\nb.jpg,b one\na.jpg,"a one"\nb.jpg, b two\ngone.jpg,nobody\nimage 99,nobody\n'
)


def write(tmp_path, name: str, data: str | bytes):
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def attached(file: CaptionFile, *keys: str, **fields) -> dict[str, list]:
    return {
        s.key: list(find_captions(s.fields).kept)
        for s in file.attach(Sample(key, b"", dict(fields)) for key in keys)
    }


@pytest.mark.parametrize("kind", ["coco", "tokens", "table", "semicolon order"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_three_kinds_of_file_say_the_same(tmp_path, kind, encoding):
    if kind == "coco":
        path = write(tmp_path, "captions.json", json.dumps(COCO).encode(encoding))
    elif kind == "tokens":
        path = write(tmp_path, "f.token.txt", TOKENS.encode(encoding))
    elif kind == "table":
        path = write(tmp_path, "c.csv", TABLE.encode(encoding))
    else:
        path = write(
            tmp_path,
            "d.csv",
            "number,caption,x,file_name\n"
            + "".join(
                f"{i},{c},,{n}\n"
                for i, (n, _, c) in enumerate(
                    line.partition(",") for line in TABLE.replace('"', "").splitlines()[1:]
                )
            ),
        )
    file = CaptionFile(path)
    assert attached(file, "a.jpg", "b.jpg", "alone.jpg") == {
        "a.jpg": ["a one"],
        "b.jpg": ["b one", "b two"],
        "alone.jpg": [],
    }
    assert file.summary() == {"captioned_pictures_missing": 2, "captions_for_no_picture": 2}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("x/a.jpg", "x/a.jpg"),
        ("a.jpg", "x/y/a.jpg"),
        ("./x/a.jpg", "x/a.jpg"),
        ("a.jpg", "x/a"),
        ("x/a.jpg", "x/a"),
        ("a", "x/a.JPG"),
        ("7.2", "7.2"),
    ],
)
def test_an_image_is_found_by_path_or_name_with_or_without_extension(tmp_path, name, key):
    assert attached(
        CaptionFile(write(tmp_path, "f.txt", f"{name}#0\tit\nother.jpg#0\tno\n")), key
    ) == {key: ["it"]}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("x/a.jpg", "y/a.jpg"),
        ("a.jpg", "a.png"),
        ("a", "a.txt"),
        ("a.b", "a.c"),
        ("a.jpg", "aa.jpg"),
    ],
)
def test_another_image_is_not_taken_for_it(tmp_path, name, key):
    file = CaptionFile(write(tmp_path, "f.txt", f"{name}#0\tit\n"))
    assert attached(file, key) == {key: []}
    with pytest.raises(DataError, match=r"none of its 1 images \('.*', \.\.\.\) is in the source"):
        file.summary()


@pytest.mark.parametrize("keys", [("x/a.jpg", "y/a.jpg"), ("a.jpg", "a.jpg"), ("x/a", "y/a")])
def test_a_name_of_two_images_is_refused_not_given_to_both(tmp_path, keys):
    with pytest.raises(DataError, match=r"'a\.jpg' is the name of two images"):
        attached(CaptionFile(write(tmp_path, "f.txt", "a.jpg#0\tit\n")), *keys)


def test_two_names_that_differ_in_the_extension_only_are_told_apart_or_not_used(tmp_path):
    path = write(tmp_path, "f.txt", "a.jpg#0\tjpeg\na.png#0\tpng\nb.jpg#0\tb\n")
    assert attached(CaptionFile(path), "a.jpg", "a.png") == {"a.jpg": ["jpeg"], "a.png": ["png"]}
    assert attached(CaptionFile(path), "a", "b") == {"a": [], "b": ["b"]}


def test_captions_of_the_file_come_to_those_beside_the_image(tmp_path):
    file = CaptionFile(write(tmp_path, "f.txt", "a.jpg#0\tfrom the file\na.jpg#1\tbeside\n"))
    assert attached(file, "a.jpg", captions="beside") == {"a.jpg": ["beside", "from the file"]}


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", "läuft.jpg#0\tx".encode("cp1252"), "another encoding"),
        ("a.csv", "name,words\nx,y\n", r"columns \['name', 'words'\]"),
        ("a.csv", "", "columns"),
        ("a.csv", "image,caption\n", "has none"),
        ("a.csv", "image,caption\na.jpg," + "x" * 200_000, "field larger"),
        ("a.csv", "image,caption\na.jpg,a man, a dog\n", "line 2: cells=3; expected 2"),
        ("a.csv", "image,caption\na.jpg,one\n\nb.jpg\n", "line 4: cells=1; expected 2"),
        ("a.csv", 'image,caption\na.jpg,"one\nb.jpg,two\n', "line 2: unexpected end of data"),
        ("a.csv", 'image,caption\na.jpg,"Hello" he said\n', "line 2: ',' expected"),
        ("a.txt", "a.jpg#0\tone\nno tab here\n", "line 2"),
        ("a.tsv", "image\tnumber\tcaption\na.jpg\t0\tone\n", "line 1: 2 TABs"),
        ("a.tsv", "a.jpg\tone\nb.jpg\t0\ttwo\n", "line 2: 2 TABs"),
        ("a.json", "{", "expected images with id"),
        ("a.json", "[]", "expected images with id"),
        ("a.json", '{"images": [], "annotations": [{"caption": "x"}]}', "image_id"),
        ("a.json", '{"images": [], "annotations": []}', "has none"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, data, words):
    with pytest.raises(DataError, match=words):
        CaptionFile(write(tmp_path, name, data))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        CaptionFile(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nan", "text of a missing value"),
        ("N/A", "text of a missing value"),
        (" None ", "text of a missing value"),
        ("12:30", "no letter"),
        ("---", "no letter"),
        ("IMG_2041.JPG", "file name"),
        ("scan.png", "file name"),
        ("a cat", None),
        ("nan bread on a plate", None),
        ("x", None),
        ("猫", None),
        ("a sign that says 7.png", None),
        ("naan", None),
    ],
)
def test_captions_that_may_say_nothing_are_kept_and_counted(
    text: str, reason: str | None, tmp_path, capsys
):
    from dpvision.cli import main

    found = find_captions({"captions": [text, "a dog"]})
    assert (
        "a dog" in found.kept
        and len(found.kept) == 2
        and found.suspicious == (() if reason is None else (reason,))
    )
    source = write_folder(
        tmp_path / "source", {"1.png": png(1), "2.png": png(2), "2.txt": b"a dog"}
    )
    (source / "1.txt").write_text(text)
    assert main(["data", "import", str(source), str(tmp_path / "store"), "--public"]) == 0
    said = capsys.readouterr().out
    assert (
        ("1 captions may say nothing" in said)
        == (reason is not None)
        == (f"captions_suspicious: {reason}" in said)
    )

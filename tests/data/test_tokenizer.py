import gzip
import hashlib
import json
import random
import threading
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import (
    MIN_VOCAB_SIZE,
    CaptionTokenizer,
    file_captions,
    scene_captions,
    store_captions,
    train_tokenizer,
)
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.synthetic.scenes import make_scene

SENTENCES = list(scene_captions(600))
WORDS = train_tokenizer(SENTENCES, 400)
BYTES = train_tokenizer(["aa aa"], MIN_VOCAB_SIZE)

# assigned in Unicode 3.2: later versions of Python and of the library agree on how these are folded
KNOWN = st.characters(exclude_categories=["Cs"]).filter(
    lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn"
)


def folded(text: str) -> str:
    """What the normaliser does, by Python's own tables; letter by letter, so that the final sigma
    is one like the others.
    """
    lower = "".join(c.lower() for c in unicodedata.normalize("NFKC", text))
    return unicodedata.normalize("NFKC", lower)


@pytest.mark.parametrize("tokenizer", [WORDS, BYTES], ids=["words", "bytes"])
@given(text=st.text(KNOWN))
@settings(max_examples=400, deadline=None)
def test_any_text_comes_back_folded_and_nothing_else(tokenizer, text):
    assert tokenizer.decode(tokenizer.words(text)) == folded(text)


@given(text=st.text(st.characters()))  # lone surrogates and unassigned characters, too
@settings(max_examples=400, deadline=None)
@example(text="H\u0331")  # in lower case the two have a common character
def test_what_came_back_has_the_same_ids_and_no_text_gives_a_special_one(text):
    words = WORDS.words(text)
    assert WORDS.words(WORDS.decode(words)) == words
    assert all(len({PAD_ID, BOS_ID, EOS_ID, i}) == 4 and i < WORDS.vocab_size for i in words)


def test_special_tokens_written_in_a_caption_are_characters():
    text = "a <eos> dog <pad><bos> <|endoftext|>"
    loaded = WORDS
    assert not {PAD_ID, BOS_ID, EOS_ID} & set(loaded.words(text))
    assert loaded.decode(loaded.words(text)) == text
    # even where the training text is full of them
    made = train_tokenizer(["<eos> <pad> <bos>"] * 50, MIN_VOCAB_SIZE + 6)
    assert not {PAD_ID, BOS_ID, EOS_ID} & set(made.words(text))


def test_a_row_is_bos_words_eos_pad_and_a_longer_caption_still_ends():
    text = "a large red disc"
    words = WORDS.words(text)
    n = len(words)
    for num_tokens in range(2, n + 6):
        row = WORDS.encode(text, num_tokens)
        assert row.dtype == np.int64 and row.shape == (num_tokens,)
        kept = words[: num_tokens - 2]
        assert row.tolist() == [BOS_ID, *kept, EOS_ID] + [PAD_ID] * (num_tokens - 2 - len(kept))
    assert WORDS.encode("", 4).tolist() == [BOS_ID, EOS_ID, PAD_ID, PAD_ID]
    assert (PAD_ID, BOS_ID, EOS_ID) == (0, 1, 2)


def test_decoding_stops_at_the_end_and_passes_over_what_is_no_text():
    words = WORDS.words("a red disc")
    assert WORDS.decode([BOS_ID, *words, EOS_ID, *words]) == "a red disc"
    assert (
        WORDS.decode([PAD_ID, BOS_ID, *words, PAD_ID, WORDS.vocab_size, 10**6, -5]) == "a red disc"
    )
    assert WORDS.decode(np.array(words)) == "a red disc"
    assert BYTES.decode(BYTES.words("é")[:1]) == "\ufffd"
    assert "".join(WORDS.pieces("a red disc")) == "a red disc"


def test_case_and_width_are_folded_and_letters_are_not():
    same = ["A Dog", "a dog", "Ａ ｄｏｇ"]
    assert len({tuple(WORDS.words(text)) for text in same}) == 1
    assert WORDS.words("a dog") != WORDS.words("a dög") != WORDS.words(" a dög")


def test_two_trainings_and_any_order_of_the_captions_give_the_same_file(tmp_path):
    shuffled = random.Random(0).sample(SENTENCES, len(SENTENCES))
    for name, captions in (("a", SENTENCES), ("b", SENTENCES), ("c", shuffled)):
        train_tokenizer(captions, 400).save(tmp_path / name)
    files = [(tmp_path / name).read_bytes() for name in "abc"]
    assert files[0] == files[1] == files[2]
    assert WORDS.digest == hashlib.sha256(files[0]).hexdigest()
    assert train_tokenizer(SENTENCES[:-50], 399).digest != WORDS.digest


def test_merges_are_those_of_the_textbook(tmp_path):
    """The most frequent pair of neighbours is joined, over and over: counted here from scratch for
    each merge.
    """
    captions = ["low low low low lower", "newest newest newest widest widest", "the low house"]
    made = train_tokenizer(captions, MIN_VOCAB_SIZE + 8)
    made.save(tmp_path / "t.json")
    merges = json.loads((tmp_path / "t.json").read_text())["model"]["merges"]
    words = [
        list(w if i == 0 else "Ġ" + w)
        for caption in captions
        for i, w in enumerate(caption.split())
    ]
    for left, right in merges:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        assert counts[left, right] == max(counts.values()) >= 2
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
                i += 1
    assert len(merges) == 8


def test_a_saved_tokenizer_is_the_same_when_loaded_however_it_is_laid_out(tmp_path):
    WORDS.save(tmp_path / "sub" / "t.json")
    loaded = CaptionTokenizer.load(tmp_path / "sub" / "t.json")
    parsed = json.loads((tmp_path / "sub" / "t.json").read_bytes())
    (tmp_path / "u.json").write_text(json.dumps(parsed, indent=3))
    other = CaptionTokenizer.load(str(tmp_path / "u.json"))
    text = "A large RED disc <eos> ½"
    assert loaded.digest == other.digest == WORDS.digest
    assert loaded.vocab_size == WORDS.vocab_size == 400
    assert loaded.words(text) == other.words(text) == WORDS.words(text)
    assert Tokenizer.from_file(str(tmp_path / "u.json")).encode("a red disc").ids == WORDS.words(
        "a red disc"
    )


def test_an_existing_file_is_never_replaced(tmp_path):
    (tmp_path / "t.json").write_text("mine")
    with pytest.raises(DataError, match="exists; expected a new file"):
        WORDS.save(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == "mine"


def _spoilt(parsed: dict, kind: str) -> dict:
    model = parsed["model"]
    if kind == "swapped ids":
        model["vocab"] |= {"<pad>": 2, "<eos>": 0}
        for entry in parsed["added_tokens"]:
            entry["id"] = {0: 2, 1: 1, 2: 0}[entry["id"]]
    elif kind == "other names":
        parsed["added_tokens"][2]["content"] = "</s>"
    elif kind == "one more special token":
        parsed["added_tokens"].append(parsed["added_tokens"][0] | {"id": 400, "content": "<mask>"})
    elif kind == "no special tokens":
        del parsed["added_tokens"]
    elif kind == "a byte is missing":
        byte = next(t for t in model["vocab"] if t == "\u0120")
        model["vocab"]["??"] = model["vocab"].pop(byte)
    elif kind == "a gap":
        model["vocab"]["zz"] = 500
    elif kind == "an id is a word":
        model["vocab"]["zz"] = "400"
    elif kind == "words":
        parsed["model"] = json.loads(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())[
            "model"
        ]
    elif kind == "prefix":
        parsed["pre_tokenizer"]["add_prefix_space"] = True
    elif kind == "no decoder":
        parsed["decoder"] = None
    elif kind == "truncation":
        parsed["truncation"] = {
            "direction": "Right",
            "max_length": 5,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    elif kind == "dropout":
        model["dropout"] = 0.1
    elif kind == "damaged merges":
        model["merges"].append(["never", "seen"])
    return parsed


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("swapped ids", "special tokens"),
        ("other names", "special tokens"),
        ("one more special token", "special tokens"),
        ("no special tokens", "special tokens"),
        ("a byte is missing", "bytes without an entry"),
        ("a gap", "gaps"),
        ("an id is a word", "gaps"),
        ("words", "no byte-pair"),
        ("prefix", "byte-level"),
        ("no decoder", "byte-level"),
        ("truncation", "truncation"),
        ("dropout", "dropout"),
        ("damaged merges", ""),
    ],
)
def test_files_that_are_no_tokenizer_of_ours_are_refused(tmp_path, kind, words):
    WORDS.save(tmp_path / "t.json")
    parsed = _spoilt(json.loads((tmp_path / "t.json").read_bytes()), kind)
    (tmp_path / "bad.json").write_text(json.dumps(parsed))
    with pytest.raises(
        DataError, match=rf"tokenizer: .*bad\.json: .*{words}.*; expected a file made by"
    ):
        CaptionTokenizer.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"null",
        b"7",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"model": {"type": "BPE", "vocab": []}}',
    ],
)
def test_files_that_are_something_else_are_refused(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DataError, match="expected a file made by"):
        CaptionTokenizer.load(tmp_path / "x")
    with pytest.raises(DataError, match="No such file"):
        CaptionTokenizer.load(tmp_path / "absent")
    with pytest.raises(DataError, match="directory"):
        CaptionTokenizer.load(tmp_path)


def test_vocabularies_that_cannot_be_are_refused():
    for size in (0, MIN_VOCAB_SIZE - 1, 10**7):
        with pytest.raises(ConfigError, match=f"vocab_size={size}; expected {MIN_VOCAB_SIZE}"):
            train_tokenizer(SENTENCES, size)
    for nothing in ([], ["", " \n", "\x07"]):
        with pytest.raises(DataError, match="no text"):
            train_tokenizer(nothing, 300)
    with pytest.raises(
        DataError,
        match=r"600 captions give (\d+) entries; expected vocab_size=30,522.*--vocab-size \1\.",
    ) as refused:
        train_tokenizer(SENTENCES, 30_522)
    got = int(str(refused.value).rpartition(" ")[2].rstrip("."))
    assert train_tokenizer(SENTENCES, got).vocab_size == got


def test_threads_share_a_tokenizer():
    texts = SENTENCES[:200]
    alone = [WORDS.encode(text, 40).tolist() for text in texts]
    wrong = []

    def work() -> None:
        for _ in range(5):
            if [WORDS.encode(text, 40).tolist() for text in texts] != alone:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- text to train on
# --------------------------------------------------------------------------------------------------


def test_sentences_are_those_of_the_drawn_scenes():
    assert SENTENCES[:20] == [make_scene(i, 16).caption for i in range(20)]
    with pytest.raises(ConfigError, match="scenes=0"):
        scene_captions(0)


def test_a_private_store_is_refused_before_anything_is_read(tmp_path):
    public, private = (
        write_scenes(tmp_path / v, 30, 16, public=v == "public") for v in ("public", "private")
    )
    assert list(store_captions(public)) == [
        public.captions(i)[0] for i in range(public.num_records)
    ]
    with pytest.raises(PrivacyError, match="private store; expected public or synthetic"):
        store_captions(private)


def test_lines_of_files_are_read_in_their_encoding_or_refused(tmp_path):
    lines = ["ein Hund läuft", "犬が走る", "e\u2028f"]
    text = "\n".join(lines)
    for name, data in {
        "a.txt": text.encode(),
        "b.txt": text.encode("utf-8-sig"),
        "c.txt": text.encode("utf-16"),
        "d.txt": text.replace("\n", "\r\n").encode(),
        "e.txt.gz": gzip.compress(text.encode("utf-16")),
    }.items():
        (tmp_path / name).write_bytes(data)
        assert [line.rstrip("\n") for line in file_captions([tmp_path / name])] == lines, name
    bad = {
        "w.txt": "läuft".encode("cp1252"),
        "u.txt": text.encode("utf-16-le"),
        "z.gz": b"no gzip",
        "cut.gz": gzip.compress(text.encode())[:-9],
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=name):
            list(file_captions([tmp_path / name]))
    with pytest.raises(DataError, match="absent"):
        list(file_captions([tmp_path / "absent"]))

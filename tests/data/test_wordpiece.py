"""BERT's WordPiece against Hugging Face's, on our captions and those of Flickr8k and COCO."""

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.data.tokenizer import CaptionTokenizer, scene_captions
from dpvision.data.wordpiece import OURS
from dpvision.errors import DataError

from ..encoders.paper_files import HEAD, write_vocabulary

TEXTS = [
    "A dog, running (fast): it's 3.5 m!",
    "naïve ÜNÏCODE Ångström a\u0301",
    "犬 und 猫 zusammen",
    "tabs\tand\nlines \u00a0 and\u200b zero width \ufffd \x07",
    "x" * 100,
    "x" * 101,
    "##ing - -- '' \" <eos> [unused5] $%&",
    "İstanbul ẞ ﬁ ½",
    "",
]
SHARED = Path(__file__).parents[3] / "shared" / "data" / "caption_text"


def _pieces(captions: list[str], size: int) -> list[str]:
    """Entries of a vocabulary trained on captions, without BERT's special ones."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        captions, trainers.WordPieceTrainer(vocab_size=size, show_progress=False)
    )
    found = made.get_vocab()
    return sorted(found, key=found.__getitem__)


def _check(captions: list[str], vocabulary: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'dpvision[hf]'")
    theirs = transformers.BertTokenizer(vocab=str(vocabulary))
    ours = CaptionTokenizer.load(vocabulary)
    assert len(theirs) == ours.vocab_size and ours.is_wordpiece
    for caption in captions:
        ids = [OURS.get(i, i) for i in theirs(caption)["input_ids"]]
        assert ours.encode(caption, len(ids)).tolist() == ids, caption
        assert ids[0] == BOS_ID and ids[-1] == EOS_ID
        text = theirs.decode(theirs(caption)["input_ids"], skip_special_tokens=True)
        assert ours.decode(ids) == text


def test_captions_have_the_ids_of_hugging_faces_tokenizer(tmp_path):
    captions = [*scene_captions(200), *TEXTS]
    vocabulary = write_vocabulary(tmp_path / "vocab.txt", _pieces(captions, 500), 620)
    _check(captions, vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flickr8k_train_captions", "coco_val2017_captions"])
def test_captions_of_people_have_the_ids_of_hugging_faces_tokenizer(tmp_path, name):
    file = SHARED / f"{name}.txt.gz"
    if not file.exists():
        pytest.skip(f"no {file}")
    captions = gzip.open(file, "rt").read().splitlines()[:8000]
    vocabulary = write_vocabulary(tmp_path / "vocab.txt", _pieces(captions[:4000], 2500), 2620)
    _check(captions, vocabulary)


def test_special_tokens_written_in_a_caption_are_words(tmp_path):
    words = CaptionTokenizer.load(write_vocabulary(tmp_path / "vocab.txt", ["[", "]"], 200))
    found = words.words("[PAD] [CLS] [SEP] a [MASK]")
    assert not {PAD_ID, BOS_ID, EOS_ID, OURS.get(103, 103)} & set(found) and len(found) > 5
    assert words.decode(words.encode("a b", 8)) == "a b"


def test_a_vocabulary_is_kept_as_one_file_that_gives_the_same_ids(tmp_path):
    made = CaptionTokenizer.load(write_vocabulary(tmp_path / "vocab.txt", ["dog"], 200))
    made.save(tmp_path / "words.json")
    kept = CaptionTokenizer.load(tmp_path / "words.json")
    assert kept.digest == made.digest and kept.is_wordpiece
    assert kept.words("A dog") == made.words("a DOG")
    (tmp_path / "win.txt").write_bytes(
        (tmp_path / "vocab.txt").read_bytes().replace(b"\n", b"\r\n")
    )
    assert CaptionTokenizer.load(tmp_path / "win.txt").digest == made.digest


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (b"a\nb\n", r"line 1 is not \[PAD\]"),
        ("\n".join([*HEAD, "a", "a"]).encode(), "an entry is there twice"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"", r"line 1 is not \[PAD\]"),
    ],
)
def test_another_vocabulary_is_refused(tmp_path, lines, words):
    (tmp_path / "vocab.txt").write_bytes(lines)
    with pytest.raises(DataError, match=rf"{words}; expected the vocabulary of BERT.*vocab\.txt"):
        CaptionTokenizer.load(tmp_path / "vocab.txt")
    with pytest.raises(DataError, match=r"No such file.*expected the vocabulary of BERT"):
        CaptionTokenizer.load(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"normalizer": None}, "not BERT's uncased WordPiece"),
        ({"truncation": {"max_length": 3}}, "not BERT's uncased WordPiece"),
        ({"added_tokens": []}, "not BERT's uncased WordPiece"),
        ({"vocab": {"[CLS]": 101, "[unused0]": 1}}, "special tokens .* with other numbers"),
        ({"vocab": {"[filler0]": 999}}, "ids with gaps"),
    ],
)
def test_a_changed_file_is_refused(tmp_path, change, words):
    made = CaptionTokenizer.load(write_vocabulary(tmp_path / "vocab.txt", ["dog"], 200))
    parsed = json.loads(made.to_bytes())
    if "vocab" in change:
        parsed["model"]["vocab"] |= change["vocab"]
    else:
        parsed |= change
    (tmp_path / "words.json").write_text(json.dumps(parsed))
    with pytest.raises(DataError, match=words):
        CaptionTokenizer.load(tmp_path / "words.json")

"""BERT's uncased WordPiece, the tokenizer of the DP-Cap paper, from its vocabulary file.

A vocabulary has one entry per line; an entry's number is its line, from 0. Padding, beginning and
end of a caption have other numbers in BERT ([PAD] 0, [CLS] 101, [SEP] 102) than here (0, 1, 2). So
the entries 1 and 101, and 2 and 102, change places (``OURS``), as the rows of DP-Cap's embedding
and head do (``encoders.papers``).
"""

from pathlib import Path
from typing import Any

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.errors import DataError

SPECIAL = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
"""Entries that no text gives, but for [UNK], by their numbers in BERT."""
OURS = {SPECIAL["[PAD]"]: PAD_ID, SPECIAL["[CLS]"]: BOS_ID, SPECIAL["[SEP]"]: EOS_ID}
OURS |= {BOS_ID: SPECIAL["[CLS]"], EOS_ID: SPECIAL["[SEP]"]}
"""Our number of each entry whose number in BERT is another, and of padding."""
_MAX_BYTES = 100_000_000
_MAX_WORD = 100  # characters; a longer word is [UNK]


def read_vocabulary(path: Path) -> dict[str, Any]:
    """Read a vocabulary file and return the tokenizer in the form of ``tokenizers``' JSON files.

    Raises:
        DataError: the file cannot be read, has an entry twice, or is not laid out as BERT's.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_BYTES).decode().split("\n")
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None
    except UnicodeError:
        raise _refused(path, "not UTF-8") from None
    entries = [line.removesuffix("\r") for line in lines[:-1] + lines[-1:] * (lines[-1] != "")]
    for entry, number in SPECIAL.items():
        if entries[number : number + 1] != [entry]:
            raise _refused(path, f"line {number + 1} is not {entry}")
    if len(set(entries)) < len(entries):
        raise _refused(path, "an entry is there twice")
    return wordpiece({entry: OURS.get(number, number) for number, entry in enumerate(entries)})


def wordpiece(vocabulary: dict[str, int]) -> dict[str, Any]:
    """Return BERT's uncased tokenizer over a vocabulary with our numbers, in the form of
    ``tokenizers``' JSON files.
    """
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary[name], "content": name, "special": True} | flags
            for name in sorted(SPECIAL, key=lambda name: vocabulary[name])
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": _MAX_WORD,
            "vocab": vocabulary,
        },
    }


def problem(parsed: dict[str, Any], vocabulary: dict[str, Any]) -> str | None:
    """Why a parsed tokenizer file is not one that ``read_vocabulary`` makes; None if it is."""
    if any(vocabulary.get(name) != OURS.get(number, number) for name, number in SPECIAL.items()):
        return "special tokens of a WordPiece vocabulary with other numbers"
    if sorted(vocabulary.values(), key=str) != sorted(range(len(vocabulary)), key=str):
        return "ids with gaps"
    return None if parsed == wordpiece(vocabulary) else "not BERT's uncased WordPiece"


def _refused(path: Path, what: str) -> DataError:
    return DataError(
        f"tokenizer: {path}: {what}; expected the vocabulary of BERT, uncased: one entry per line, "
        "[PAD] first, [CLS] and [SEP] on lines 102 and 103. Use vocab.txt of bert-base-uncased, "
        "or a .json file made by `dpvision data tokenizer`."
    )

"""Captions as token ids: byte-level BPE (Hugging Face ``tokenizers``) in one JSON file, the public
text that it is trained on, and the token rows of a batch. ``wordpiece`` has BERT's tokenizer.

A normaliser inside the file folds case and variants of characters (NFKC, lower case): the captions
in the DP-Cap paper's figures are in lower case, 30,522 entries is the size of a lower-case
vocabulary, CIDEr folds case too, and under noise one embedding that learns from both "A dog" and "a
dog" is better than two. Every text can be encoded in bytes, so there is no unknown token. The text
ends up in the tokenizer's file.

Legend: B records, V views, L tokens of a caption.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dpvision.config import BOS_ID, EOS_ID, PAD_ID
from dpvision.data import wordpiece
from dpvision.data.captions import MAX_TEXT_BYTES, clean_caption, text_encoding
from dpvision.data.keys import StepKey
from dpvision.data.rows import Rows
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.files import create
from dpvision.synthetic.scene_layout import Draws, draw_layout
from dpvision.synthetic.scene_text import make_caption

SPECIAL = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
"""One character for each of the 256 bytes."""
MIN_VOCAB_SIZE = len(ALPHABET) + len(SPECIAL)
_MAX_VOCAB_SIZE = 1_000_000
_MIN_COUNT = 2  # a merge that occurs once memorises its text and is useless for other captions


class CaptionTokenizer:
    """Encodes captions as ids, and decodes them. Made by ``load`` or ``train_tokenizer``; safe to
    use from several threads.
    """

    def __init__(self, canonical: str) -> None:
        """``canonical`` is the file's canonical JSON (``_canonical``), checked."""
        self._json = canonical
        self._tokenizer = Tokenizer.from_str(canonical)
        # without this, "<eos>" written in a caption would end it; it must be five characters
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        """Number of entries, special ones included; ids run from 0 to vocab_size - 1."""
        self.digest = hashlib.sha256(canonical.encode()).hexdigest()
        """SHA-256 of the canonical JSON (sorted keys, no blanks), independent of the file's
        layout.
        """
        self.is_wordpiece = isinstance(self._tokenizer.model, models.WordPiece)
        """Whether it is BERT's WordPiece, which has an entry for unknown words."""

    @classmethod
    def load(cls, path: str | Path) -> "CaptionTokenizer":
        """Load a tokenizer from a file; from a .txt file as the vocabulary of BERT's WordPiece.

        Raises:
            DataError: the file is missing; it is neither BERT's uncased WordPiece nor a byte-level
                BPE with the special ids of ``dpvision.config``; or it would lose text (a byte
                without an entry, truncation) or be random (BPE dropout).
        """
        path = Path(path)
        if path.suffix == ".txt":
            return cls(_canonical(wordpiece.read_vocabulary(path)))
        try:
            parsed = json.loads(path.read_bytes())
            problem = _problem(parsed)
            if problem is None:
                return cls(_canonical(parsed))
        except OSError as error:
            problem = error.strerror or str(error)
        except (ValueError, RecursionError):
            problem = "not JSON"
        except Exception as error:  # the library's only type of error
            problem = str(error)
        raise DataError(
            f"tokenizer: {path}: {problem}; expected a file made by `dpvision data tokenizer`. "
            "Make one, or pass another path."
        )

    def save(self, path: str | Path) -> None:
        """Write the one JSON file, in canonical form: its SHA-256 is ``digest``. An existing file
        is not replaced.

        Raises:
            DataError: the file exists, or cannot be written.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create(path, self.to_bytes())
        except FileExistsError:
            raise DataError(
                f"tokenizer: {path} exists; expected a new file: runs may depend on it. Choose "
                "another name."
            ) from None
        except OSError as error:
            raise DataError(
                f"tokenizer: {path}: {error.strerror}; expected to write it. Choose another place."
            ) from None

    def to_bytes(self) -> bytes:
        """Return the file as ``save`` writes it."""
        return self._json.encode()

    def words(self, caption: str) -> list[int]:
        """Ids of the whole caption, without BOS and EOS; never a special id, whatever the text."""
        return self._tokenizer.encode(_without_surrogates(caption)).ids

    def encode(self, caption: str, num_tokens: int) -> np.ndarray:
        """Encode a caption as a row of a batch: BOS, ids, EOS, then PAD; a longer caption is cut
        before EOS.

        Args:
            num_tokens: L, at least 2; 40 in DP-Cap.

        Returns:
            int64 of shape (L,).
        """
        words = self.words(caption)[: num_tokens - 2]
        token_L = np.full(num_tokens, PAD_ID, dtype=np.int64)
        token_L[: len(words) + 2] = [BOS_ID, *words, EOS_ID]
        return token_L

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids up to the first EOS; special ids and ids without an entry are skipped, broken
        UTF-8 gives U+FFFD.

        The inverse of ``words``, except for what the normaliser folds.
        """
        words: list[int] = []
        for i in map(int, ids):
            if i == EOS_ID:
                break
            if i not in (PAD_ID, BOS_ID) and 0 <= i < self.vocab_size:
                words.append(i)
        return self._tokenizer.decode(words)

    def pieces(self, caption: str) -> list[str]:
        """Split the caption into the texts of its ids; part of a character gives U+FFFD."""
        return [self._tokenizer.decode([i]) for i in self.words(caption)]


def train_tokenizer(captions: Iterable[str], vocab_size: int) -> CaptionTokenizer:
    """Train a byte-level BPE of exactly ``vocab_size`` entries: 3 special tokens, 256 bytes, and
    merges by frequency.

    Deterministic: the same captions in any order give the same file. They are cleaned as at an
    import. Their text ends up in the file, so they must be public or synthetic (docs/privacy.md).

    Args:
        vocab_size: 259 (bytes only) to 1,000,000; DP-Cap: 30,522.

    Raises:
        ConfigError: ``vocab_size`` is out of range.
        DataError: there is no text, or too little for so many entries: a merge must occur twice.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= _MAX_VOCAB_SIZE:
        rule = (
            f"{MIN_VOCAB_SIZE} (256 bytes and {len(SPECIAL)} special tokens) to {_MAX_VOCAB_SIZE:,}"
        )
        raise ConfigError(
            f"tokenizer: vocab_size={vocab_size}; expected {rule}. DP-Cap uses 30,522; 440 "
            "suffice for scenes."
        )
    num_captions = 0

    def cleaned() -> Iterator[str]:
        nonlocal num_captions
        for caption in captions:
            if clean := clean_caption(caption):
                num_captions += 1
                yield clean

    made = Tokenizer(models.BPE())
    # lower-casing can leave a letter and an accent that compose to one character: NFKC again, so
    # that folding is idempotent
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.NFKC()]
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        cleaned(),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=_MIN_COUNT,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(ALPHABET),
            show_progress=False,
        ),
    )
    if num_captions == 0:
        raise DataError(
            "tokenizer: no text; expected captions. Name a file with one caption a line."
        )
    if (got := made.get_vocab_size()) != vocab_size:
        raise DataError(
            f"tokenizer: {num_captions:,} captions give {got:,} entries; expected "
            f"vocab_size={vocab_size:,}, each merge occurring twice. Give more text, or pass "
            f"--vocab-size {got}."
        )
    return CaptionTokenizer(_canonical(json.loads(made.to_str())))


def _canonical(parsed: Any) -> str:
    return json.dumps(parsed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can encode, by U+FFFD: the library rejects them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _problem(parsed: Any) -> str | None:
    """Why a parsed tokenizer file is not acceptable; None if it is."""
    model = parsed.get("model") if isinstance(parsed, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(model, dict) and model.get("type") == "WordPiece" and isinstance(vocab, dict):
        return wordpiece.problem(parsed, vocab)
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(vocab, dict):
        return "no byte-pair encoding"
    added = parsed.get("added_tokens")
    found = (
        {entry.get("content"): entry.get("id") for entry in added} if _are_objects(added) else {}
    )
    if found != SPECIAL or any(vocab.get(name) != i for name, i in SPECIAL.items()):
        return f"special tokens {found}, expected {SPECIAL}"
    if sorted(vocab.values(), key=str) != sorted(range(len(vocab)), key=str):
        return "ids with gaps"
    if not vocab.keys() >= ALPHABET:
        return "bytes without an entry"
    before, after = parsed.get("pre_tokenizer"), parsed.get("decoder")
    if not _is_byte_level(before) or before.get("add_prefix_space") or not _is_byte_level(after):
        return "not byte-level without a blank before the text"
    for name in ("truncation", "padding", "post_processor"):
        if parsed.get(name) is not None:
            return f"{name} is set"
    for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"{name} is set"
    return None


def _are_objects(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(entry, dict) for entry in value)


def _is_byte_level(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "ByteLevel"


_ROWS_AT_ONCE = 1024


def file_captions(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of text files, one caption each; .gz files are decompressed as they are read.

    Raises:
        DataError: a file cannot be read, or its encoding cannot be determined.
    """
    for path in paths:
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                data = io.BufferedReader(file)  # type: ignore[arg-type, unused-ignore]
                lines = io.TextIOWrapper(data, encoding=text_encoding(data.peek(4)[:4]))
                while line := lines.readline(MAX_TEXT_BYTES):
                    if "\0" in line:
                        raise UnicodeError("NUL in the text")
                    yield line
        except UnicodeError:
            raise DataError(
                f"tokenizer: {path} is in another encoding; expected UTF-8, or UTF-16 with a "
                "byte order mark. Convert it with iconv."
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"tokenizer: {path}: {error}; expected a readable text file. Check the path, or "
                "copy it again."
            ) from None


def store_captions(store: Store) -> Iterator[str]:
    """Yield all captions of a public store, record by record.

    Raises:
        PrivacyError: the store is private, or cleared of private twins. A tokenizer shows which
            words occur, and no noise is added to it (docs/privacy.md).
    """
    if store.results_visibility != "public":
        kind = "private" if store.visibility == "private" else "cleared"
        raise PrivacyError(
            f"tokenizer: {store.path} is a {kind} store; expected public or synthetic text: the "
            "file would show words of the captions. Use --text with public captions, --scenes, "
            "or a store imported with --public."
        )
    starts = range(0, store.num_records, _ROWS_AT_ONCE)
    return (
        caption
        for start in starts
        for captions in store.captions_many(
            np.arange(start, min(start + _ROWS_AT_ONCE, store.num_records))
        )
        for caption in captions
    )


def scene_captions(num: int) -> Iterator[str]:
    """Captions of the scenes 0 ... num - 1, the same as ``synthetic.scenes.make_scene`` gives,
    without rendering the images.

    Raises:
        ConfigError: ``num`` is below 1.
    """
    if not num >= 1:
        raise ConfigError(f"tokenizer: scenes={num}; expected at least 1. Use 20000.")
    return map(_sentence, range(num))


def _sentence(i: int) -> str:
    draws = Draws(i)
    return make_caption(draw_layout(draws), draws)


_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class CaptionReader:
    """Reads, chooses and encodes captions; safe to use from several threads."""

    tokenizer: CaptionTokenizer
    num_tokens: int
    """L, BOS and EOS included, at least 2."""

    def read(
        self, store: Store, rows: np.ndarray, key: StepKey, views: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw and encode one caption per view for the records ``rows``.

        A record's captions are permuted by (seed, step, record id) in the stream "caption"; view v
        takes the v-th of them, starting over if there are fewer. So all captions are equally
        likely, and none repeats before each was used.

        Returns:
            token_BVL int64, and has_caption_B bool. A record without a caption, or with a damaged
            line in the store, gets the tokens of an empty caption, so that its loss is finite; the
            caller gives it weight zero.
        """
        captions = store.captions_many(rows)
        most = max(map(len, captions), default=0)
        # a record's i-th number is the same however many are drawn, so neighbours with more
        # captions change nothing
        uniform = key.uniform_numpy(store.index["id"][rows], "caption", max(most, 1))
        token_BVL = np.empty((len(rows), views, self.num_tokens), dtype=np.int64)
        empty_L = self.tokenizer.encode("", self.num_tokens)
        for b, own in enumerate(captions):
            if not own:
                token_BVL[b] = empty_L
                continue
            order = np.argsort(uniform[b, : len(own)], kind="stable").tolist()
            encoded = {i: self.tokenizer.encode(own[i], self.num_tokens) for i in order[:views]}
            for v in range(views):
                token_BVL[b, v] = encoded[order[v % len(own)]]
        return token_BVL, np.array([bool(own) for own in captions], dtype=bool)


def check_captions(store: Store, rows: Rows) -> None:
    """Refuse a store that a captioner cannot be trained on.

    The number of captions in a private store is private: the message is for the operator's terminal
    and goes into no file of the run. Nothing is raised during a step.

    Args:
        rows: int64 rows that may be drawn.

    Raises:
        DataError: a record has no caption.
    """
    missing = sum(
        int((~store.has_captions(rows[i : i + _AT_ONCE])).sum())
        for i in range(0, len(rows), _AT_ONCE)
    )
    if missing:
        raise DataError(
            f"store: {store.path}: {missing:,} of {len(rows):,} records have no caption; "
            "expected one each. Import the source with its captions (--captions FILE), or with "
            "--require-captions, which leaves such images out."
        )

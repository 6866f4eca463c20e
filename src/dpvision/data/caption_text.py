"""Text to train a tokenizer on: files, public stores, captions of procedural scenes. It ends up in
the tokenizer's file.
"""

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dpvision.data.captions import MAX_TEXT_BYTES, text_encoding
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.synthetic.scene_layout import Draws, draw_layout
from dpvision.synthetic.scene_text import make_caption

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
    return _store_captions(store)


def _store_captions(store: Store) -> Iterator[str]:
    for start in range(0, store.num_records, _ROWS_AT_ONCE):
        for captions in store.captions_many(
            np.arange(start, min(start + _ROWS_AT_ONCE, store.num_records))
        ):
            yield from captions


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

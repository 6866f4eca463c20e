"""``dpvision data tokenizer``: train a tokenizer on public or synthetic text."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from dpvision.cli.output import emit, pairs
from dpvision.cli.paths import check_store
from dpvision.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dpvision.data.tokenizer import CaptionTokenizer

MEASURED = 100_000
"""Number of captions, from the start of the text, on which lengths are measured. They are held in
memory.
"""
_EXAMPLES = 5
_TELL_EVERY = 1000

OutPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT.json")]


def tokenizer(
    out: OutPath,
    vocab_size: int = 30_522,
    text: tuple[Path, ...] = (),
    store: Path | None = None,
    scenes: int | None = None,
    num_tokens: int = 40,
    json: bool = False,
) -> None:
    """Train a tokenizer (byte-level BPE, lower case) on public or synthetic captions and write it
    as one JSON file.

    The file reveals its training text and is released with every checkpoint, so a private store is
    refused. Give --text, --store, --scenes or several of them: a warm start on scenes and training
    on photographs need one tokenizer for both.

      dpvision data tokenizer words.json --text captions.txt.gz more.txt     one caption per line
      dpvision data tokenizer words.json --store stores/public
      dpvision data tokenizer both.json --text captions.txt.gz --scenes 20000 --vocab-size 2048
      dpvision data tokenizer scenes.json --scenes 20000 --vocab-size 440    every word of the
                                                                             scenes is one token

    Args:
        out: New file for the tokenizer.
        vocab_size: Number of entries, including 3 special tokens and 256 bytes; the model needs the
            same (--model.vocab-size).
        text: Text files, one caption per line; .gz is accepted.
        store: A public store.
        scenes: Captions of this many procedural scenes.
        num_tokens: Caption length in training, to report the share of truncated captions.
        json: Print JSON.
    """
    if not text and store is None and scenes is None:
        raise ConfigError(
            "data tokenizer: no text; expected --text, --store or --scenes. For example --text "
            "captions.txt."
        )
    if not num_tokens >= 2:
        raise ConfigError(
            f"data tokenizer: num_tokens={num_tokens}; expected at least 2, for BOS and EOS. "
            "DP-Cap uses 40."
        )
    if out.exists():
        raise DataError(
            f"data tokenizer: {out} exists; expected a new file: runs may depend on it. Choose "
            "another name."
        )
    check_store(store)
    from dpvision.data.open import open_store
    from dpvision.data.tokenizer import (
        file_captions,
        scene_captions,
        store_captions,
        train_tokenizer,
    )

    captions = chain(
        file_captions(text),
        () if store is None else store_captions(open_store(store)),
        () if scenes is None else scene_captions(scenes),
    )
    first: list[str] = []
    with Console(stderr=True).status("reading") as status:
        made = train_tokenizer(
            _read_once(captions, first, lambda n: status.update(f"reading: {n:,} captions")),
            vocab_size,
        )
        status.update("measuring")
        result: dict[str, Any] = {
            "tokenizer": str(out),
            "vocab_size": made.vocab_size,
            "digest": made.digest,
        }
        result |= _measured(made, first, num_tokens)
        made.save(out)
    splits = result["examples"]
    lines = [
        pairs({name: value for name, value in result.items() if name != "examples"}),
        "  examples",
    ]
    lines += [f"    {'|'.join(split)}" for split in splits]
    lines.append(
        f"For a captioner: --data.tokenizer {quote(str(out))} --model.vocab-size {made.vocab_size}"
    )
    emit(result, json, "\n".join(lines))


def _measured(made: "CaptionTokenizer", clean: list[str], num_tokens: int) -> dict[str, Any]:
    """Return caption lengths, with BOS and EOS, over clean captions, and the tokens of a few
    examples.
    """
    lengths = [len(made.words(caption)) + 2 for caption in clean]
    return {
        "captions_measured": len(clean),
        "tokens_per_caption": sum(lengths) / len(lengths),
        "share_cut": sum(length > num_tokens for length in lengths) / len(lengths),
        "num_tokens": num_tokens,
        "examples": [made.pieces(caption) for caption in islice(dict.fromkeys(clean), _EXAMPLES)],
    }


def _read_once(
    captions: Iterator[str], first: list[str], tell: Callable[[int], None]
) -> Iterator[str]:
    """Yield the captions and append the first ``MEASURED`` to ``first``, cleaned: a pipe cannot be
    read again to measure them.
    """
    from dpvision.data.captions import clean_caption

    for number, caption in enumerate(captions, start=1):
        if number % _TELL_EVERY == 0:
            tell(number)
        if len(first) < MEASURED and (clean := clean_caption(caption)):
            first.append(clean)
        yield caption

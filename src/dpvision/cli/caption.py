"""``dpvision caption``: images in, sentences out."""

import contextlib
import csv
import json as json_module
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from dpvision.cli.output import RunPath, emit, parse
from dpvision.cli.paths import check_run
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError
from dpvision.eval.captions.settings import Fit
from dpvision.files import replacing
from dpvision.runs.folder import require_confidential

if TYPE_CHECKING:
    from dpvision.eval.captions.caption_images import Captioned

Places = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PICTURES [PICTURES ...]")]
_NAMED_AT_MOST = 20


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(caption, "caption", argv)


def caption(
    run: RunPath,
    pictures: Places,
    method: Literal["greedy", "beam", "sample"] = "greedy",
    beams: int = 4,
    num: int = 1,
    prompt: str = "",
    length_penalty: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_words: int = 1,
    max_words: int | None = None,
    fit: Fit = "squash",
    ema: bool = False,
    seed: int = 0,
    out: Path | None = None,
    batch_size: int = 32,
    workers: int = 2,
    release_private_outputs: bool = False,
    json: bool = False,
) -> None:
    """Say in words what is in images.

    Each line is an image's name and a caption. What cannot be read is named and counted; the status is 2 only if nothing could be.
    Captions of private images are private: the guarantee covers the weights, not what they make of an image. A file of them goes to a
    folder called confidential. Images that are in no store count as private.

      dpvision caption runs/cap photos/cat.jpg photos/dog.png
      dpvision caption runs/cap stores/pets --method beam --out captions.jsonl
      dpvision caption runs/cap photos --method sample --num 3 --temperature 0.8 --prompt "a photo of"

    Args:
        run: Run of a captioner, or one of its checkpoints.
        pictures: Image files, folders, stores, .tar or .parquet files.
        method: greedy (the likeliest word each time), beam (a search for the likeliest captions) or sample (words drawn).
        beams: Unfinished captions that a beam search keeps.
        num: Captions of each image: the best of a beam search, or independent samples.
        prompt: Words that every caption begins with.
        length_penalty: A beam search ranks by log probability / words^THIS; 0 prefers short captions.
        temperature: Of sampling; below 1 keeps to likelier words.
        top_k: Sample among this many likeliest words.
        top_p: Sample among the fewest words that have this share of the probability.
        min_words: Tokens that a caption has at least, without the prompt's.
        max_words: Tokens that it has at most; left out, as many as the model has places.
        fit: squash shows the model the whole image, squeezed to a square; crop its centre.
        ema: Use the averaged weights.
        seed: Of sampling. An image's samples are the same whatever is captioned with it.
        out: Write captions here instead: .jsonl (a line for each image) or .csv (a line for each caption). For private images its path
            needs a folder called confidential.
        batch_size: Images that are encoded together.
        workers: Threads that read images.
        release_private_outputs: Write captions of private images anywhere. You decide this for the people in them: no epsilon covers it.
        json: Print JSON.
    """
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        if not value >= 1:
            raise ConfigError(f"caption: {name}={value}; expected at least 1. Leave it out.")
    if not 0 <= seed < 2**31:
        raise ConfigError(f"caption: seed={seed}; expected 0 to 2^31 - 1. Use a small integer.")
    if out is not None:
        _check_out(out)
    check_run(run)
    import torch

    from dpvision.eval.captions.caption_images import caption_pictures, find_images, prompt_ids
    from dpvision.eval.captions.open_captioner import open_captioner
    from dpvision.models.generate import GenerateSettings

    captioner = open_captioner(run, ema=ema, device="cuda" if torch.cuda.is_available() else "cpu")
    settings = GenerateSettings(
        method=method, num=num, beams=beams, length_penalty=length_penalty, temperature=temperature, top_k=top_k, top_p=top_p,
        min_words=min_words, max_words=max_words, prompt=prompt_ids(captioner, prompt),
    )  # fmt: skip
    found = find_images(pictures, workers)
    private = captioner.confidential or found.visibility == "private"
    if out is not None and private and not release_private_outputs:
        require_confidential(out, "caption", "captions of private images", ", or say --release-private-outputs")
    made: list[Captioned] = []
    unreadable: list[Captioned] = []
    num_done = 0
    with contextlib.ExitStack() as stack:
        # Lines and a moving status would get in each other's way on a terminal.
        status = None if out is None and not json else stack.enter_context(Console(stderr=True).status("reading"))
        write = _print_lines if out is None else stack.enter_context(_writer(out))
        for one in caption_pictures(captioner, found.samples, settings, fit=fit, seed=seed, batch_size=batch_size, workers=workers):
            if one.problem is not None:
                unreadable.append(one)
                continue
            num_done += 1
            if json:
                made.append(one)
            if out is not None or not json:
                write(one)
            if status is not None:
                status.update(f"captions: {num_done:,} images")
        if num_done == 0:
            raise DataError(
                f"caption: {_unreadable_text(unreadable) or 'no images'}; expected one or more that can be read. Correct the path."
            )
    if unreadable:
        print((OPERATOR_ONLY if private else "") + _unreadable_text(unreadable), file=sys.stderr)
    visibility = "private" if private else "public"
    if json:
        result: dict[str, Any] = {"captions": [_plain(one) for one in made], "unreadable": [_plain(one) for one in unreadable]}
        emit(result | {"visibility": visibility, "out": None if out is None else str(out)}, True, "")
    elif out is not None:
        text = f"captions of {num_done:,} images in {out}"
        emit({}, False, text + ("\nThese are captions of private images: keep the file where the images are kept." if private else ""))


def _plain(one: "Captioned") -> dict[str, Any]:
    if one.problem is not None:
        return {"picture": one.name, "problem": one.problem}
    return {"picture": one.name, "captions": [{"text": c.text, "log_probability": c.log_probability} for c in one.captions]}


def _print_lines(one: "Captioned") -> None:
    for said in one.captions:
        print(f"{one.name}: {said.text}", flush=True)


def _unreadable_text(unreadable: "list[Captioned]") -> str:
    if not unreadable:
        return ""
    named = ", ".join(f"{one.name} ({one.problem})" for one in unreadable[:_NAMED_AT_MOST])
    more = f", and {len(unreadable) - _NAMED_AT_MOST:,} more" if len(unreadable) > _NAMED_AT_MOST else ""
    return f"{len(unreadable):,} could not be read: {named}{more}"


def _check_out(out: Path) -> None:
    if out.suffix not in (".jsonl", ".csv") or out.is_dir():
        raise ConfigError(f"caption: out={str(out)!r}; expected a file that ends in .jsonl or .csv. Rename it.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"caption: out={str(out)!r}; expected a folder that exists. Make {out.parent}.")


@contextlib.contextmanager
def _writer(out: Path) -> Iterator[Callable[["Captioned"], None]]:
    """Writes captions to a file that takes its name when all are there; it is gone when the block fails."""
    try:
        with replacing(out) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            yield _csv_writer(file) if out.suffix == ".csv" else _jsonl_writer(file)
    except OSError as error:
        raise DataError(
            f"caption: {out} ({error.strerror or error}); expected a writable place with space. Choose another --out."
        ) from None


def _jsonl_writer(file: IO[str]) -> Callable[["Captioned"], None]:
    return lambda one: print(json_module.dumps(_plain(one), ensure_ascii=False), file=file)


def _csv_writer(file: IO[str]) -> Callable[["Captioned"], None]:
    rows = csv.writer(file)
    rows.writerow(("picture", "caption", "log_probability"))
    return lambda one: rows.writerows((one.name, said.text, f"{said.log_probability:.6g}") for said in one.captions)

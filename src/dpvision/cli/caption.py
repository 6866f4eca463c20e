"""``dpvision caption``: caption images."""

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

Places = Annotated[
    tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES [IMAGES ...]")
]
_NAMED_AT_MOST = 20


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(caption, "caption", argv)


def caption(
    run: RunPath,
    images: Places,
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
    """Caption images with a trained captioner.

    Each line is an image's name and a caption. Unreadable files are counted and named; the exit
    status is 2 only if no image could be read. Captions of private images are private: the
    guarantee covers the weights, not their output on an image. A file of them needs a folder named
    confidential in its path. Images outside a store count as private.

      dpvision caption runs/cap photos/cat.jpg photos/dog.png
      dpvision caption runs/cap stores/pets --method beam --out captions.jsonl
      dpvision caption runs/cap photos --method sample --num 3 --temperature 0.8 --prompt "a photo
      of"

    Args:
        run: Run folder of a captioner, or one of its checkpoints.
        images: Image files, folders, stores, .tar or .parquet files.
        method: greedy (most likely token at each step), beam (beam search) or sample (random
            tokens).
        beams: Width of the beam search.
        num: Captions per image: the best of a beam search, or independent samples.
        prompt: Text that every caption starts with.
        length_penalty: Beam search ranks by log probability / length^PENALTY; 0 prefers short
            captions.
        temperature: Sampling temperature; below 1 prefers likelier tokens.
        top_k: Sample from the K most likely tokens.
        top_p: Sample from the smallest set of tokens with this total probability.
        min_words: Minimum number of tokens, without the prompt.
        max_words: Maximum number of tokens; if omitted, the model's maximum.
        fit: squash resizes the whole image to a square; crop takes its centre.
        ema: Use the averaged weights.
        seed: Seed of sampling. An image's samples do not depend on the other images.
        out: Write captions to this file instead: .jsonl (a line per image) or .csv (a line per
            caption). For private images its path needs a folder named confidential.
        batch_size: Images encoded together.
        workers: Threads that read images.
        release_private_outputs: Write captions of private images anywhere. You decide this for the
            people shown; no epsilon covers it.
        json: Print JSON.
    """
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        if not value >= 1:
            raise ConfigError(
                f"caption: {name}={value}; expected at least 1. Omit it for the default."
            )
    if not 0 <= seed < 2**31:
        raise ConfigError(f"caption: seed={seed}; expected 0 to 2^31 - 1. Use a small integer.")
    if out is not None:
        _check_out(out)
    check_run(run)
    import torch

    from dpvision.data.image_files import find_images
    from dpvision.eval.captions.caption_images import caption_files, prompt_ids
    from dpvision.eval.captions.open_captioner import open_captioner
    from dpvision.models.generate import GenerateSettings

    captioner = open_captioner(run, ema=ema, device="cuda" if torch.cuda.is_available() else "cpu")
    settings = GenerateSettings(
        method=method,
        num=num,
        beams=beams,
        length_penalty=length_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_words=min_words,
        max_words=max_words,
        prompt=prompt_ids(captioner, prompt),
    )
    found = find_images(images, workers=workers, window=captioner.window)
    private = captioner.confidential or found.visibility == "private"
    if out is not None and private and not release_private_outputs:
        require_confidential(
            out, "caption", "captions of private images", ", or give --release-private-outputs"
        )
    made: list[Captioned] = []
    unreadable: list[Captioned] = []
    num_done = 0
    with contextlib.ExitStack() as stack:
        # No status line while captions are printed to the same terminal.
        status = (
            None
            if out is None and not json
            else stack.enter_context(Console(stderr=True).status("reading"))
        )
        write = _print_lines if out is None else stack.enter_context(_writer(out))
        for one in caption_files(
            captioner,
            found.samples,
            settings,
            fit=fit,
            seed=seed,
            batch_size=batch_size,
            workers=workers,
        ):
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
                f"caption: {_unreadable_text(unreadable) or 'no images'}; expected at least one "
                "readable image. Give other paths."
            )
    if unreadable:
        print((OPERATOR_ONLY if private else "") + _unreadable_text(unreadable), file=sys.stderr)
    visibility = "private" if private else "public"
    if json:
        result: dict[str, Any] = {
            "captions": [_plain(one) for one in made],
            "unreadable": [_plain(one) for one in unreadable],
        }
        emit(
            result | {"visibility": visibility, "out": None if out is None else str(out)}, True, ""
        )
    elif out is not None:
        text = f"captions of {num_done:,} images in {out}"
        emit(
            {},
            False,
            text
            + (
                "\nThese are captions of private images: keep the file where the images are kept."
                if private
                else ""
            ),
        )


def _plain(one: "Captioned") -> dict[str, Any]:
    if one.problem is not None:
        return {"image": one.name, "problem": one.problem}
    return {
        "image": one.name,
        "captions": [{"text": c.text, "log_probability": c.log_probability} for c in one.captions],
    }


def _print_lines(one: "Captioned") -> None:
    name = one.name.encode(
        errors="backslashreplace"
    ).decode()  # a file name may have bytes that are no UTF-8
    for said in one.captions:
        print(f"{name}: {said.text}", flush=True)


def _unreadable_text(unreadable: "list[Captioned]") -> str:
    if not unreadable:
        return ""
    named = ", ".join(f"{one.name} ({one.problem})" for one in unreadable[:_NAMED_AT_MOST])
    more = (
        f", and {len(unreadable) - _NAMED_AT_MOST:,} more"
        if len(unreadable) > _NAMED_AT_MOST
        else ""
    )
    return f"{len(unreadable):,} could not be read: {named}{more}"


def _check_out(out: Path) -> None:
    if out.suffix not in (".jsonl", ".csv") or out.is_dir():
        raise ConfigError(
            f"caption: out={str(out)!r}; expected a file that ends in .jsonl or .csv. Rename it."
        )
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"caption: out={str(out)!r}; expected an existing folder. Run mkdir -p {out.parent}."
        )


@contextlib.contextmanager
def _writer(out: Path) -> Iterator[Callable[["Captioned"], None]]:
    """Yield a function that writes captions to a temporary file, renamed to ``out`` on success and
    deleted on failure.

    Bytes of a file name that are no UTF-8 are written as escapes: \\udce9 is the byte 0xe9.
    """
    try:
        with (
            replacing(out) as partial,
            partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
        ):
            yield _csv_writer(file) if out.suffix == ".csv" else _jsonl_writer(file)
    except OSError as error:
        raise DataError(
            f"caption: {out} ({error.strerror or error}); expected a writable path with free "
            "space. Choose another --out."
        ) from None


def _jsonl_writer(file: IO[str]) -> Callable[["Captioned"], None]:
    return lambda one: print(json_module.dumps(_plain(one), ensure_ascii=False), file=file)


def _csv_writer(file: IO[str]) -> Callable[["Captioned"], None]:
    rows = csv.writer(file)
    rows.writerow(("image", "caption", "log_probability"))
    return lambda one: rows.writerows(
        (one.name, said.text, f"{said.log_probability:.6g}") for said in one.captions
    )

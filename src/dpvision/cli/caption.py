"""``dpvision caption``: caption images."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dpvision.cli import printable
from dpvision.cli.each_image import Release, for_each
from dpvision.cli.output import FLAT, Images, Reading, RunPath, emit, parse
from dpvision.cli.paths import check_captioner
from dpvision.config.generation import GenerateSettings
from dpvision.errors import OPERATOR_ONLY, ConfigError
from dpvision.eval.captions.settings import Fit
from dpvision.files import check_out

if TYPE_CHECKING:
    from dpvision.eval.captions.caption_images import Captioned


@dataclass(frozen=True)
class _Generation(GenerateSettings):
    prompt: Annotated[tuple[int, ...], tyro.conf.Suppress] = ()


def caption(
    run: RunPath,
    images: Images,
    settings: Annotated[_Generation, FLAT] = _Generation(),
    prompt: str = "",
    fit: Fit = "squash",
    ema: bool = False,
    seed: int = 0,
    out: Path | None = None,
    reading: Annotated[Reading, FLAT] = Reading(32),
    release: Annotated[Release, FLAT] = Release(),
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
        run: Run folder of a captioner, one of its checkpoints, or dpcap:FILE@vocab.txt, a file of
            DP-Cap with BERT's vocabulary.
        images: Image files, folders, stores, .tar or .parquet files.
        settings: How captions are generated.
        prompt: Text that every caption starts with.
        fit: squash resizes the whole image to a square; crop takes its centre.
        ema: Use the averaged weights.
        seed: Seed of sampling. An image's samples do not depend on the other images.
        out: Write captions to this file instead: .jsonl (a line per image) or .csv (a line per
            caption). For private images its path needs a folder named confidential.
        reading: How images are read.
        release: Where captions may be written.
        json: Print JSON.
    """
    reading.check("caption")
    if not 0 <= seed < 2**31:
        raise ConfigError(f"caption: seed={seed}; expected 0 to 2^31 - 1. Use a small integer.")
    if out is not None:
        check_out(out, "caption", ".jsonl", ".csv")
    check_captioner(run)
    import torch

    from dpvision.data.image_files import find_images
    from dpvision.eval.captions.caption_images import caption_files, captions_writer, prompt_ids
    from dpvision.eval.captions.open_captioner import open_captioner

    captioner = open_captioner(run, ema=ema, device="cuda" if torch.cuda.is_available() else "cpu")
    found = find_images(images, workers=reading.workers, window=captioner.window)
    private = captioner.confidential or found.visibility == "private"
    release.check(out, "caption", "captions of private images", private, name="out")
    done = for_each(
        caption_files(
            captioner,
            found.samples,
            replace(settings, prompt=prompt_ids(captioner, prompt)),
            fit=fit,
            seed=seed,
            batch_size=reading.batch_size,
            workers=reading.workers,
        ),
        out,
        captions_writer,
        _print_lines,
        command="caption",
        what="captions",
        total=found.total,
        private=private,
        json=json,
    )
    if json:
        result = {
            "captions": [one.to_dict() for one in done.made],
            "unreadable": [one.to_dict() for one in done.unreadable],
            "visibility": "private" if private else "public",
            "out": None if out is None else str(out),
        }
        emit(result, True, "")
    elif out is not None:
        whose = OPERATOR_ONLY if private else ""
        print(f"{whose}captions of {done.num_done:,} images in {out}")
        if private:
            print("These are captions of private images: keep the file where the images are kept.")


def _print_lines(one: "Captioned") -> None:
    for said in one.captions:
        print(f"{printable(one.name)}: {said.text}", flush=True)


run = partial(parse, caption, "caption")

"""Caption images from files, packs and stores (``data.image_files``).

Legend: B images of a batch, N captions per image, C channels, H height, W width, L tokens.
"""

import contextlib
import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from dpvision.data.captions import clean_caption
from dpvision.data.decode import BadImage, decode
from dpvision.data.image_files import ImageFile
from dpvision.data.keys import StepKey
from dpvision.data.ordered import ordered_map
from dpvision.data.transform import centre_box, cut, normalise
from dpvision.eval.captions.open_captioner import OpenCaptioner
from dpvision.eval.captions.settings import Fit
from dpvision.files import writing_text
from dpvision.models.generate import GenerateSettings, generate

_MOST_ROWS = 256
"""Captions generated at once, including beams: their keys and values are in memory."""


class Caption(NamedTuple):
    """One caption."""

    text: str
    """On one line: control characters and runs of spaces become one space."""
    log_probability: float
    """Mean per token, as in ``models.generate.Said``."""


class Captioned(NamedTuple):
    """An image's captions, or the problem with the image."""

    name: str
    captions: tuple[Caption, ...]
    """Best first if they are ranked; empty if ``problem`` is set."""
    problem: str | None = None
    """"not an image", "damaged" and the like."""

    def to_dict(self) -> dict[str, Any]:
        """As a line of a .jsonl file."""
        if self.problem is not None:
            return {"image": self.name, "problem": self.problem}
        return {"image": self.name, "captions": [one._asdict() for one in self.captions]}


def caption_files(
    captioner: OpenCaptioner,
    files: Iterable[ImageFile],
    settings: GenerateSettings | None = None,
    *,
    fit: Fit = "squash",
    seed: int = 0,
    batch_size: int = 32,
    workers: int = 2,
) -> Iterator[Captioned]:
    """Yield captions of each image, in order.

    Sampling is keyed by ``seed`` and the image's bytes, so that neither its name nor other images
    change its captions.

    Args:
        fit: how to make an image square, as in ``image_source``.
        batch_size: images read and encoded together, at least 1.
        workers: threads that read images, at least 1.

    Raises:
        ConfigError, CheckpointError: as ``models.generate.generate``.
    """
    how = settings or GenerateSettings()
    how.longest(
        captioner.num_tokens, captioner.tokenizer.vocab_size
    )  # raises before the first image is read

    def read(file: ImageFile) -> tuple[Captioned, np.ndarray | None, int]:
        pixels, problem = None, file.problem
        if problem is None:
            try:
                pixels = square(
                    decode(file.image, window=None if file.stored else captioner.window),
                    captioner.image_size,
                    fit,
                )
            except BadImage as error:
                problem = error.reason
        return Captioned(file.name, (), problem), pixels, image_number(file.image)

    waiting: list[tuple[Captioned, np.ndarray | None, int]] = []
    for found in ordered_map(read, files, workers=workers, ahead=2 * batch_size):
        waiting.append(found)
        if len(waiting) == batch_size:
            yield from _captioned(captioner, waiting, how, seed)
            waiting.clear()
    yield from _captioned(captioner, waiting, how, seed)


@contextlib.contextmanager
def captions_writer(out: Path) -> Iterator[Callable[[Captioned], object]]:
    """Yield a function that writes captions to ``out``: a .csv file (a line per caption), or lines
    of JSON (a line per image). Images that could not be read are passed over.

    It is written as by ``files.writing_text``.

    Raises:
        DataError: the file cannot be written.
    """
    with writing_text(out, "caption") as file:
        if out.suffix != ".csv":
            yield (
                lambda one: (
                    one.problem or print(json.dumps(one.to_dict(), ensure_ascii=False), file=file)
                )
            )
            return
        rows = csv.writer(file)
        rows.writerow(("image", "caption", "log_probability"))
        yield lambda one: rows.writerows(
            (one.name, said.text, f"{said.log_probability:.6g}") for said in one.captions
        )


@torch.inference_mode()
def caption_pixels(
    captioner: OpenCaptioner,
    pixels_BHWC: np.ndarray,
    number_B: Sequence[int],
    settings: GenerateSettings,
    seed: int = 0,
) -> list[tuple[Caption, ...]]:
    """Caption images that have the captioner's size.

    Args:
        pixels_BHWC: uint8.
        number_B: number of each image (``image_number``), for sampling.

    Raises:
        ConfigError, CheckpointError: as ``models.generate.generate``.
    """
    x_BCHW = np.empty((len(pixels_BHWC), 3, *pixels_BHWC.shape[1:3]), dtype=np.float32)
    normalise(pixels_BHWC, captioner.data.mean, captioner.data.std, x_BCHW)
    memory_BSD = captioner.model.encode(torch.from_numpy(x_BCHW).to(captioner.device))
    uniform_BNL = None
    if settings.method == "sample":
        words = settings.longest(captioner.num_tokens, captioner.tokenizer.vocab_size) + 1
        key, number = StepKey(seed, 0), torch.tensor(number_B, dtype=torch.int64)
        uniform_BNL = torch.stack(
            [key.uniform(number, f"say.{n}", words) for n in range(settings.num)], dim=1
        )
    made: list[tuple[Caption, ...]] = []
    at_once = max(1, _MOST_ROWS // (settings.beams if settings.method == "beam" else settings.num))
    for b in range(0, len(memory_BSD), at_once):
        here = slice(b, b + at_once)
        for said in generate(
            captioner.model,
            memory_BSD[here],
            settings,
            None if uniform_BNL is None else uniform_BNL[here],
        ):
            made.append(
                tuple(
                    Caption(one_line(captioner.tokenizer.decode(s.ids)), s.log_probability)
                    for s in said
                )
            )
    return made


def square(pixels_HWC: np.ndarray, image_size: int, fit: Fit) -> np.ndarray:
    """Return an image as a captioner's input, uint8 (image_size, image_size, 3)."""
    image = Image.fromarray(pixels_HWC)
    box = (
        centre_box(*image.size)
        if fit == "crop"
        else (0.0, 0.0, float(image.width), float(image.height))
    )
    return cut(image, box, image_size)


def image_number(image: bytes) -> int:
    """Return a 63-bit hash of an image file, for keys of draws. It reveals the image, so it must
    not be written to files.
    """
    return int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "little") >> 1


def prompt_ids(captioner: OpenCaptioner, prompt: str) -> tuple[int, ...]:
    """Return the tokens of a prompt, cleaned like captions; the space before the next word belongs
    to the next word.
    """
    return tuple(captioner.tokenizer.words(clean_caption(prompt)))


def one_line(text: str) -> str:
    """Return the text on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _captioned(
    captioner: OpenCaptioner,
    waiting: list[tuple[Captioned, np.ndarray | None, int]],
    settings: GenerateSettings,
    seed: int,
) -> Iterator[Captioned]:
    readable = [(pixels, number) for _, pixels, number in waiting if pixels is not None]
    said: Iterator[tuple[Caption, ...]] = iter(())
    if readable:
        pixels_B, number_B = zip(*readable, strict=True)
        said = iter(caption_pixels(captioner, np.stack(pixels_B), number_B, settings, seed))
    for made, pixels, _ in waiting:
        yield made if pixels is None else made._replace(captions=next(said))

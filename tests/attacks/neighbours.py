"""Worlds that differ in one private record or person, for ``test_nothing_leaves.py``: stores,
commands and what is public of them.

In a world the keys, ids and store keys that come from the operating system follow from a counter,
and each release is its noise alone: ``dp.noise`` adds it to zeros in place of the private sum. What
the guarantee covers is then equal in all worlds, and so must be every byte that may leave. No byte
is left out of the comparison or replaced before it, weights and their digests included.
"""

import contextlib
import hashlib
import io
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dpvision.cli import main
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.dp import noise
from dpvision.encoders import feature_file
from dpvision.errors import OPERATOR_ONLY
from dpvision.privacy import store_marks
from dpvision.privacy.stream import Key

from ..captioners import COLOURS, image, make_tokenizer, png

NUM, TOKENS = 200, ("zzprivate7", "qwyxblorft", "ward-of-zz")
"""Declared records; words in the private images' names, captions and paths."""
PRIVATE_STORES = ("ward-of-zz", "tests-of-zz")
Change = Callable[[list[Sample]], list[Sample]]


def _sample(number: int, name: str, caption: str) -> Sample:
    return Sample(f"{name}-{number}", png(number), {"captions": [caption], "label": number % 4})


def private_samples(first: int, num: int) -> list[Sample]:
    return [
        _sample(n, TOKENS[0], f"{image(n)[1]} {TOKENS[1]} {n}") for n in range(first, first + num)
    ]


def less(samples: list[Sample]) -> list[Sample]:
    return samples[:17] + samples[18:]


def more(samples: list[Sample]) -> list[Sample]:
    return [*samples, _sample(7777, TOKENS[0], "one more")]


def hostile(mode: str, size: tuple[int, int], caption: str) -> Change:
    """Replace a record by a white image of another size and mode, whose label is the last."""

    def change(samples: list[Sample]) -> list[Sample]:
        file = io.BytesIO()
        white = 65535 if mode == "I;16" else "white"
        Image.new(mode, size, white).save(file, "TIFF" if mode == "CMYK" else "PNG")
        label = len(COLOURS) - 1
        fields = {"captions": [caption, caption], "label": label}
        odd = Sample(f"{TOKENS[0]}-hostile", file.getvalue(), fields)
        return [*samples[:17], odd, *samples[18:]]

    return change


def damaged(samples: list[Sample]) -> list[Sample]:
    """Replace a record by a file that opens and whose pixels end early."""
    cut = samples[17].image
    odd = samples[17]._replace(image=cut[: len(cut) // 2])
    return [*samples[:17], odd, *samples[18:]]


def _of_person(person: int, first: int, num: int) -> list[Sample]:
    """Images of one person, who is named by a token."""
    return [
        _sample(n, TOKENS[0], TOKENS[1])._replace(
            fields={"label": n % 4, "person": f"{TOKENS[1]} {person}"}
        )
        for n in range(first, first + num)
    ]


def people_samples(first: int) -> list[Sample]:
    """100 people of two images each."""
    return [s for p in range(NUM // 2) for s in _of_person(p, first + 2 * p, 2)]


PEOPLE_CHANGES: dict[str, Change] = {
    "one person less": lambda samples: samples[:16] + samples[18:],
    "one image less": less,
    "an image damaged": damaged,
    "two images of a person more": lambda samples: [*samples, *_of_person(8, 5000, 2)],
}
"""Changes of one person's images: images 16 and 17 are those of person 8."""

_ROUNDING = re.compile(r"(?<=largest difference from the run's outputs ).*")
"""How far an exported model is from the run's on pixels of a fixed seed, which libraries round by
where arrays lie in memory. ``export.write._difference`` sees the weights alone.
"""
_OPERATORS = {("data", "inspect"), ("data", "split")}
"""Commands that print what a store holds, for whoever holds it (docs/privacy.md)."""

CHANGES: dict[str, Change] = {
    "less": less,
    "more": more,
    "huge and white": hostile("RGB", (3000, 1500), "white " * 400),
    "CMYK, no caption": hostile("CMYK", (5, 90), ""),
    "16 bits": hostile("I;16", (16, 16), "\u202e\x00<script>{}"),
    "damaged": damaged,
}


def write_stores(change: Change, people: bool) -> None:
    """Write the stores and other inputs of a world into the working directory.

    Args:
        people: whether the private stores name persons; the change is then one of
            ``PEOPLE_CHANGES``.
    """
    names = [*COLOURS]
    for name, first in zip(PRIVATE_STORES, (0, 400), strict=True):
        # One image less than is declared: of more, no full batch is drawn (docs/threat_model.md).
        samples = change(people_samples(first) if people else private_samples(first, NUM - 1))
        rule, persons = LabelRule(classes=names), PersonRule("person" if people else None)
        import_samples(samples, f"stores/{name}", people=persons, labels=rule, workers=1)
    public = [_sample(n, "open", image(n)[1]) for n in range(1000, 1060)]
    rule = LabelRule(classes=names)
    import_samples(public, "stores/open", public=True, labels=rule, workers=1)
    Path("words.json").write_bytes(make_tokenizer().to_bytes())
    Path("declared.json").write_text(json.dumps(_DECLARED))
    Path("photos").mkdir()
    for number in range(3):
        Path(f"photos/{number}.png").write_bytes(png(2000 + number))


@contextlib.contextmanager
def fixed(number: int) -> Iterator[None]:
    """Fix what comes from the operating system, and take the private sum out of each release.

    Args:
        number: of the command, so that each has other keys and ids.
    """
    count = [number << 32]

    def token(num: int | None = None) -> bytes:
        count[0] += 1
        return hashlib.blake2b(count[0].to_bytes(8, "big"), digest_size=num or 32).digest()

    run = noise._Release.run

    def noise_alone(self: Any, shares: list[Any]) -> None:
        run(self, [replace(share, summed=torch.zeros_like(share.summed)) for share in shares])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", token)
        patch.setattr(secrets, "token_hex", lambda num=None: token(num).hex())
        patch.setattr(Key, "__init__", lambda self: self._hold(token()))
        patch.setattr(noise._Release, "run", noise_alone)
        patch.setattr(time, "monotonic", lambda: 0.0)
        patch.setattr(feature_file, "seconds_per_image", lambda encoder, device="cpu": 2.0)
        patch.setattr(store_marks, "place", lambda folder, store_id: {f"path:{folder}"})
        yield


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit status."""

    argv: Sequence[str]
    status: int
    out: str
    err: str

    @property
    def public(self) -> tuple[int, str, str]:
        """Without the lines for the operator, which are marked."""
        if tuple(self.argv[:2]) in _OPERATORS:
            return self.status, "", ""

        def kept(text: str) -> str:
            if text.startswith("{"):
                found = json.loads(text)
                text = json.dumps({k: v for k, v in found.items() if k != "operator_only"})
            lines = (line for line in text.splitlines() if OPERATOR_ONLY not in line)
            return _ROUNDING.sub("", "\n".join(lines))

        return self.status, kept(self.out), kept(self.err)


def run(argv: Sequence[str]) -> Said:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(argv))
        except SystemExit as stop:
            status = int(stop.code or 0)
    return Said(argv, status, out.getvalue(), err.getvalue())


def public_files() -> dict[str, tuple[int, bytes]]:
    """Mode and content of each file and folder that may leave, by path."""
    found = {}
    for path in sorted(Path().rglob("*")):
        inside = "confidential" in path.parts[:-1] or path.parts[:2] in _CLOSED
        # Digests of weights without a guarantee, by which ``train`` knows them again: they stay
        # beside the store, with its ledgers.
        if inside or path.name.startswith("unprotected-"):
            continue
        content = path.read_bytes() if path.is_file() else b"(folder)"
        found[str(path)] = (path.stat().st_mode, content)
    return found


_DECLARED = {
    "name": "a model",
    "curators": ["we"],
    "intended_use": "a test",
    "region": "EU",
    "publication_date": "2026-11-27",
    "sector": "Healthcare",
    "justification": "a test",
}
_CLOSED = {("stores", name) for name in (*PRIVATE_STORES, "cleared", "half-a", "half-b")}
"""Private stores, their halves, and a public one cleared of private images, whose content is
private as a whole (docs/overlap.md).
"""


@dataclass(frozen=True)
class World:
    """What a world's commands said, and all that may leave it."""

    said: list[Said]
    files: dict[str, tuple[int, bytes]]


def live(change: Change, commands: Sequence[Sequence[str]], people: bool = False) -> World:
    """Make a world in a folder of the working directory, run commands in it, and remove it: the
    next one has the same paths.
    """
    folder = Path("world")
    folder.mkdir()
    try:
        with contextlib.chdir(folder):
            with fixed(0):
                write_stores(change, people)
            said = []
            for number, command in enumerate(commands, 1):
                with fixed(number):
                    said.append(run(command))
            return World(said, public_files())
    finally:
        shutil.rmtree(folder)

"""Images with a class per pixel: a folder of images, a folder of masks with the same stems, and a
map from ids to classes.

ADE20K's benchmark (``ADEChallengeData2016``) has such a pair for training and validation: id 0 is
"other" and ignored, 1 to 150 are the classes. Masks refer to the stored pixels, so an image's
orientation is not applied here.

Legend: H height, W width, K classes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpvision.data.beside import is_hidden
from dpvision.data.decode import BadImage, decode, stored_ids, stored_size
from dpvision.data.folders import IMAGE_EXTENSIONS
from dpvision.data.ordered import ordered_map
from dpvision.errors import DataError

IGNORED = 255
"""Class number of pixels that do not count."""
MAX_CLASSES = 255
ADE20K_CLASSES = 150
_WHERE = "segmentation"


@dataclass(frozen=True)
class ClassMap:
    """Map from ids in masks to classes; class k has the name ``names[k]``."""

    names: tuple[str, ...]
    number_of: Mapping[int, int]
    """Class number by id."""
    ignored: frozenset[int]
    """Ids of pixels that do not count."""

    def numbers(self, id_HW: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return class numbers, uint8 (H, W), ``IGNORED`` for pixels that do not count, and the
        unknown ids.
        """
        ids, place = np.unique(id_HW, return_inverse=True)
        unknown = [
            int(i) for i in ids if int(i) not in self.number_of and int(i) not in self.ignored
        ]
        table = np.array([self.number_of.get(int(i), IGNORED) for i in ids], dtype=np.uint8)
        return table[place].reshape(id_HW.shape), unknown

    def note(self) -> str | None:
        """Return a note about a class whose name suggests that it should be ignored, or None."""
        for i, number in self.number_of.items():
            if self.names[number].lower() in (
                "unlabeled",
                "unlabelled",
                "void",
                "ignore",
                "ignored",
            ):
                others = " ".join(map(str, sorted({i, *self.ignored})))
                return (
                    f"id {i} is called {self.names[number]!r} and counts as a class; leave it "
                    f"out with --ignore-ids {others}."
                )
        return None


class Labelled(NamedTuple):
    """One image with its mask, as read."""

    pixels_HWC: np.ndarray
    """uint8 RGB."""
    class_HW: np.ndarray
    """uint8 class numbers, or ``IGNORED``."""


@dataclass(frozen=True)
class SemanticFolder:
    """Images and masks by stem. Made by ``open_folder``, which checks all of them."""

    name: str
    """Name of the data in scores."""
    files: tuple[tuple[Path, Path], ...]
    """Image and mask, in the order of their stems."""
    classes: ClassMap

    def __len__(self) -> int:
        return len(self.files)

    @property
    def num_images(self) -> int:
        return len(self.files)

    @property
    def num_classes(self) -> int:
        return len(self.classes.names)

    def read(self, number: int) -> Labelled:
        """An image and its mask, of one size.

        Raises:
            DataError: a file changed since the folder was opened.
        """
        image_path, mask = self.files[number]
        return Labelled(read_pixels(image_path), read_mask(mask, image_path, self.classes))


def load_classes(path: Path, ignore_ids: Sequence[int] | None = None) -> ClassMap:
    """Load classes from JSON, ``{"1": "person", "7": "train"}``, in the order of their ids, without
    ignored ones.

    Args:
        ignore_ids: if None, id 255, unless the file names it.

    Raises:
        DataError: another format, fewer than two classes, or more than 255.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{_WHERE}: classes={str(path)!r} ({error.strerror}); expected a JSON file. Check "
            "the path."
        ) from None
    except (ValueError, RecursionError):
        found = None
    wrong = (
        f'{_WHERE}: classes={str(path)!r}; expected JSON from ids to names, {{"1": "person"}}. '
        "Write such a file."
    )
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and key.isdecimal() for key, name in found.items()
    ):
        raise DataError(wrong)
    if len({int(key) for key in found}) < len(found):
        raise DataError(
            f"{_WHERE}: classes={str(path)!r} has an id twice, such as 1 and 01; expected each "
            "once. Remove one."
        )
    if ignore_ids is None:
        ignore_ids = () if any(int(key) == IGNORED for key in found) else (IGNORED,)
    ignored = frozenset(ignore_ids)
    kept = sorted((int(key), name) for key, name in found.items() if int(key) not in ignored)
    if not 2 <= len(kept) <= MAX_CLASSES:
        rule = f"expected 2 to {MAX_CLASSES} that are not ignored"
        raise DataError(
            f"{_WHERE}: classes={str(path)!r} has {len(kept)} classes; {rule}. Change the file, "
            "or --ignore-ids."
        )
    return ClassMap(
        tuple(name for _, name in kept), {i: k for k, (i, _) in enumerate(kept)}, ignored
    )


def ade20k_classes(root: Path) -> ClassMap:
    """Return the 150 classes of ADE20K's benchmark, named by ``objectInfo150.txt`` if it exists."""
    names = [f"class {i}" for i in range(1, ADE20K_CLASSES + 1)]
    table = root / "objectInfo150.txt"
    if table.is_file():
        rows = [
            line.split("\t")
            for line in table.read_text(encoding="utf-8", errors="replace").splitlines()
        ]
        for row in rows:
            if row[0].isdecimal() and 1 <= int(row[0]) <= ADE20K_CLASSES:
                names[int(row[0]) - 1] = row[-1].split(",")[0].strip()
    return ClassMap(tuple(names), {i + 1: i for i in range(ADE20K_CLASSES)}, frozenset([0]))


def open_ade20k(
    root: Path, *, workers: int = 2, progress: Callable[[str], None] | None = None
) -> tuple[SemanticFolder, SemanticFolder]:
    """Open the training and validation parts of ``ADEChallengeData2016``. Raises as
    ``open_folder``.
    """
    if not (root / "annotations").is_dir() or not (root / "images").is_dir():
        rule = "expected ADEChallengeData2016 with its folders images and annotations"
        raise DataError(f"{_WHERE}: ade20k={str(root)!r}; {rule}. Check the path.")
    classes = ade20k_classes(root)
    train, test = (
        open_folder(
            root / "images" / part,
            root / "annotations" / part,
            classes,
            name=f"{root.name} {part}",
            workers=workers,
            progress=progress,
        )
        for part in ("training", "validation")
    )
    return train, test


def open_folder(
    images: Path,
    masks: Path,
    classes: ClassMap,
    *,
    name: str | None = None,
    workers: int = 2,
    progress: Callable[[str], None] | None = None,
) -> SemanticFolder:
    """Pair every mask with its image, and check the ids of all masks and the sizes of all images.

    Args:
        images: folder; images without a mask are left out (COCO's folders have many), masks without
            an image are an error.
        masks: folder of PNG files with one channel, a class id per pixel.
        name: name of the data in scores; if None, the last two parts of the masks' path.
        progress: called with lines of progress.

    Raises:
        DataError: no folder, no mask, a duplicate stem, a missing image, an unreadable file, a mask
            with several channels, another size or unknown ids, or masks without any labelled pixel.
    """
    shown = name or "/".join(masks.absolute().parts[-2:])
    mask_of, image_of = (
        _by_stem(masks, {"png"}, "masks"),
        _by_stem(images, IMAGE_EXTENSIONS, "images"),
    )
    missing = sorted(set(mask_of) - set(image_of))
    if missing:
        first = (
            f"{len(missing):,} of {len(mask_of):,} masks have no image in {images}, the first is "
            f"{mask_of[missing[0]].name}"
        )
        raise DataError(
            f"{_WHERE}: {first}; expected one of the same stem for each. Restore them, or move "
            "these masks away."
        )
    files = tuple((image_of[stem], mask_of[stem]) for stem in sorted(mask_of))

    def look(pair: tuple[Path, Path]) -> bool:
        image_path, mask = pair
        class_HW = read_mask(mask, image_path, classes)
        try:
            size = stored_size(_bytes(image_path))
        except BadImage as error:
            raise DataError(f"{_WHERE}: {image_path}: {error}") from None
        if size != class_HW.shape[::-1]:
            got = (
                f"{class_HW.shape[1]} x {class_HW.shape[0]} px for an image of {size[0]} x "
                f"{size[1]}"
            )
            raise DataError(
                f"{_WHERE}: {mask}: {got}; expected the image's size. Resize it without "
                "interpolation."
            )
        return bool((class_HW != IGNORED).any())

    labelled = 0
    for n, found in enumerate(ordered_map(look, files, workers=workers, ahead=8 * workers), 1):
        labelled += found
        if progress is not None and (n % 100 == 0 or n == len(files)):
            progress(f"{shown}: looked at {n:,} of {len(files):,} masks")
    if not labelled:
        raise DataError(
            f"{_WHERE}: {masks}: no pixel of {len(files):,} masks counts; expected classes. "
            "Change --classes or --ignore-ids."
        )
    return SemanticFolder(shown, files, classes)


def read_pixels(path: Path) -> np.ndarray:
    """Return the stored pixels of an image, uint8 RGB (H, W, 3), by the rules of ``data.decode``;
    not turned. Raises DataError.
    """
    try:
        return decode(_bytes(path), upright=False)
    except BadImage as error:
        raise DataError(f"{_WHERE}: {path}: {error}") from None


def read_mask(path: Path, image_path: Path, classes: ClassMap) -> np.ndarray:
    """Return the class numbers of a mask, uint8 (H, W). Raises DataError as ``open_folder``."""
    try:
        id_HW = stored_ids(_bytes(path))
    except BadImage as error:
        if error.reason == "unsupported":
            rule = (
                f"expected one channel with an id for each pixel (of {image_path.name}). Convert "
                "its colours to ids."
            )
        else:
            rule = (
                "expected a whole PNG. Restore it."
                if error.reason == "damaged"
                else "expected an image. Restore it."
            )
        raise DataError(f"{_WHERE}: {path}: {error.detail}; {rule}") from None
    class_HW, unknown = classes.numbers(id_HW)
    if unknown:
        some = ", ".join(map(str, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        remedy = "Add them to --classes, or leave them out with --ignore-ids."
        raise DataError(
            f"{_WHERE}: {path}: ids {some}; expected those of {len(classes.names)} classes. "
            f"{remedy}"
        )
    return class_HW


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{_WHERE}: {path} ({error.strerror}); expected an image. Restore it."
        ) from None


def _by_stem(folder: Path, extensions: set[str] | frozenset[str], what: str) -> dict[str, Path]:
    if not folder.is_dir():
        raise DataError(
            f"{_WHERE}: {what}={str(folder)!r} is not a folder; expected one with {what}. Check "
            "the path."
        )
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix[1:].lower() in extensions and not is_hidden(path.name):
            if path.stem in found:
                raise DataError(
                    f"{_WHERE}: {path} and {found[path.stem].name}; expected every stem once. "
                    "Move one away."
                )
            found[path.stem] = path
    if not found:
        raise DataError(
            f"{_WHERE}: {what}={str(folder)!r} has none ({', '.join(sorted(extensions))}); "
            "expected some. Check the path."
        )
    return found

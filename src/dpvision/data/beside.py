"""Find what lies in a source and is not data.

Hidden and thumbnail folders, splits, masks, tables below the source.

Names decide. Files that are never data are left out and counted; a layout that has two readings is
refused with the command for each.
"""

import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path, PurePath
from shlex import quote
from typing import NoReturn

from dpvision.errors import DataError

HIDDEN = "hidden or thumbnail"
MASK = "mask of another image"
"""Reasons to leave a file out."""

_SYSTEM = frozenset(
    [
        "@eadir",
        "__macosx",
        "#recycle",
        "@recycle",
        "$recycle.bin",
        "system volume information",
        "lost+found",
        "#snapshot",
        "@tmp",
        "__pycache__",
    ]
)
"""Folders that NAS devices, photo programs, macOS, Windows and file systems make among images, in
lower case; others begin with a dot.
"""
_SPLITS = {
    "train": "train",
    "training": "train",
    "trn": "train",
    "trainval": "trainval",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
    "tst": "test",
    "eval": "eval",
    "evaluation": "eval",
    "holdout": "holdout",
}
_SPLIT_IN_NAME = re.compile(
    rf"(?:^|[-_. ])({'|'.join(sorted(_SPLITS, key=len, reverse=True))})(?=[-_. \d]|$)"
)
_IMAGE_FOLDERS = frozenset(["image", "images", "img", "imgs", "jpegimages", "photos", "pictures"])
_MASK_FOLDERS = frozenset(
    (
        "mask",
        "masks",
        "annotation",
        "annotations",
        "gt",
        "groundtruth",
        "ground_truth",
        "seg",
        "segmentation",
        "segmentations",
        "labels",
    )
) | {"label_images", "segmentationclass", "segmentationobject"}
_MASK_NAME = re.compile(
    r"(.*[^ _.-])[ _.-]+(?:mask|masks|seg|segmentation|gt|groundtruth|ground_truth"
    r"|annotation)(?:[ _-]?\d+)?",
    re.IGNORECASE,
)


def is_hidden(path: str) -> bool:
    """Whether a part of a path in the source is hidden, or a folder that a system makes.

    The path has slashes and is relative to the source.
    """
    if "/" in path:
        return any(is_hidden(part) for part in path.split("/"))
    return (path[:1] == "." and path not in (".", "..")) or path.lower() in _SYSTEM


def is_mask_of(stem: str, stems: Container[str]) -> bool:
    """Whether a file's name is that of a mask, as 1_mask beside 1.

    ``stems`` are those of the images of its folder.
    """
    found = _MASK_NAME.fullmatch(stem)
    return found is not None and found[1] in stems


def split_of(folder: str) -> str | None:
    """Return the split that a folder's name means, or None."""
    return _SPLITS.get(folder.lower())


def check_folders(
    folder: Path, below: Sequence[str], *, top: bool, has_images: bool, for_import: bool = True
) -> None:
    """Raise DataError if the folders in a folder are splits, or images and their masks.

    Args:
        below: names of the folders in it, without hidden ones.
        top: it is the source.
        has_images: there are images in it.
        for_import: the remedy is a command of the import for each; otherwise the path of each.
    """
    splits = [name for name in below if split_of(name) is not None]
    if len({split_of(name) for name in splits}) > 1 or (
        top and splits and len(splits) == len(below) and not has_images
    ):
        raise DataError(
            f"source: {folder}: the folders {', '.join(sorted(splits))} are splits, no classes; "
            "expected one of them. "
            f"{_each((folder / name for name in sorted(splits)), for_import)}"
        )
    images, masks = (
        [name for name in below if name.lower() in names]
        for names in (_IMAGE_FOLDERS, _MASK_FOLDERS)
    )
    if images and masks:
        train = (
            f"--train {quote(str(folder / images[0]))} --train-masks "
            f"{quote(str(folder / masks[0]))}"
        )
        raise DataError(
            f"source: {folder}: the folder {masks[0]} beside {images[0]} holds masks or "
            "annotations, no class; expected images only. "
            f"{_alone(folder / images[0], for_import)}; for segmentation: dpvision evaluate "
            f"segmentation ENCODER {train} ..."
        )


def check_table(table: Path, source: Path) -> None:
    """Raise DataError for a table of images below the source, whose rows would not be read."""
    raise DataError(
        f"source: {table}: a table below the source; expected it at {source / table.name}, with "
        f"paths from there. Import its folder alone: {_commands([table.parent])}; or merge it "
        "into one table there."
    )


def check_packed(source: Path, paths: Sequence[Path], for_import: bool = True) -> None:
    """Raise DataError if parquet files or tars are of several splits, by their names or folders."""
    of: dict[str, list[Path]] = {}
    for path in paths:
        inside = path.relative_to(source) if path.is_relative_to(source) else PurePath(path.name)
        found = _SPLIT_IN_NAME.search(path.stem.lower())
        names = (
            [found[1]]
            if found
            else [part for part in inside.parts[:-1] if split_of(part) is not None]
        )
        if names:
            of.setdefault(_SPLITS[names[-1].lower()], []).append(path)
    if len(of) > 1:
        raise DataError(
            f"source: {source}: files of the splits {', '.join(of)}; expected one split. "
            f"{_each((_pattern(files, paths) for files in of.values()), for_import)}"
        )


def tar_folders(images: Sequence[str], plain: bool) -> set[str]:
    """Return the folders of a tar whose names would be lost.

    Args:
        images: keys of the images.
        plain: the tar holds images only.
    """
    tops = {key.partition("/")[0] for key in images if "/" in key}
    return {top for top in tops if split_of(top)} | (
        {key.rpartition("/")[0] for key in images} if plain and tops else set()
    )


def check_tar(path: Path, plain: bool, seen: set[str]) -> None:
    """Raise DataError for a tar of folders whose names would be lost.

    These are splits, and class folders of images without labels or texts.

    Args:
        seen: ``tar_folders`` of this tar and of those before.
    """
    unpack = f"mkdir DIR; tar -xf {quote(str(path))} -C DIR; dpvision data import DIR STORE"
    if len({split_of(name) for name in seen} - {None}) > 1:
        raise DataError(
            f"source: {path}: folders of several splits, {', '.join(sorted(seen))}; expected "
            f"one. Unpack it: {unpack}."
        )
    if len(seen) > 1 and plain:
        raise DataError(
            f"source: {path}: images in folders ({', '.join(sorted(seen)[:3])}) without labels "
            "or texts; expected a WebDataset. If the folder is the class, add --label-from "
            f"parent; if it is the person, --unit-from parent; or unpack it: {unpack}."
        )


def check_dicom(source: Path, dicom: Path, other: Path | None, for_import: bool = True) -> None:
    """Raise DataError if there is another kind of image below the folder of DICOM files."""
    if other is None:
        return
    folders = sorted(
        {source.joinpath(*path.relative_to(source).parts[:1]) for path in (dicom, other)}
    )
    apart = all(map(Path.is_dir, folders)) and len(folders) > 1
    raise DataError(
        f"source: {dicom} is DICOM, beside {other}; expected one kind. Move the others away"
        + (f", or keep to the folders. {_each(folders, for_import)}" if apart else ".")
    )


def is_nifti(name: str) -> bool:
    """Whether a file's name is that of a NIfTI volume."""
    return name.lower().endswith((".nii", ".nii.gz"))


def refuse_nifti(path: Path) -> NoReturn:
    """Raise DataError for a NIfTI volume."""
    raise DataError(
        f"source: {path}: a NIfTI volume; expected 2-D images. Write its slices as PNG by nibabel, "
        "five lines of Python: see docs/dicom.md."
    )


def _pattern(files: Sequence[Path], others: Sequence[Path]) -> Path:
    """Return a path that ``data import`` reads as these files alone."""
    if len(files) == 1:
        return files[0]
    folder, suffix = files[0].parent, files[0].suffix
    outside = [path for path in others if path not in files and path.parent == folder]
    if not outside or {path.parent for path in files} != {folder}:
        return folder
    names = [path.name for path in files]
    shared = next(
        (n for n, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), 0
    )
    found = _SPLIT_IN_NAME.search(files[0].stem.lower())
    patterns = [f"{names[0][:shared]}*{suffix}", f"*{found[1] if found else ''}*{suffix}"]
    return folder / next(
        (p for p in patterns if not any(path.match(p) for path in outside)), patterns[0]
    )


def _each(places: Iterable[Path], for_import: bool) -> str:
    if for_import:
        return f"Import each into a store of its own: {_commands(places)}."
    return f"Give one of them: {', '.join(quote(str(place)) for place in places)}."


def _alone(place: Path, for_import: bool) -> str:
    return (
        f"Import the images: {_commands([place])}"
        if for_import
        else f"Give the images: {quote(str(place))}"
    )


def _commands(places: Iterable[Path]) -> str:
    return "; ".join(
        f"dpvision data import {quote(str(place))} STORE{n or ''}" for n, place in enumerate(places)
    )

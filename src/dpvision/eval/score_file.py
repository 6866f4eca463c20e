"""Files of scores: a run's scores.json, and confidential/scores.json for private ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpvision import files
from dpvision.errors import CheckpointError, remedy_for
from dpvision.eval.score import Score
from dpvision.runs.folder import require_confidential, run_base
from dpvision.strict_json import parse_json

if TYPE_CHECKING:
    from dpvision.data.store import Store
    from dpvision.eval.class_scores import ClassScores

CLASS_SCORES = "class_scores.json"
"""File of figures per class in a run, by the name of the test store."""
RELEASED = "released_scores.json"
"""A run's public file of the scores that were released on private stores."""
_SCORED = Path(files.CONFIDENTIAL, "scored_stores.json")
"""Ids of the private test stores that a run was scored on, also if the scores are not kept."""
_RELEASED_FORMAT = "dpvision-released-scores-1"
KEPT = (
    "run_id",
    "store_id",
    "weights",
    "averaged_weights",
    "calibration",
    "plan",
    "charged",
    "confidential_scores_first",
)
"""Entries of a release that a statement keeps (``statement.released_scores``)."""
NOTHING_FITTED = "nothing"
"""``train_data`` of a score without a fitted probe: a run's own head, or a captioner."""


def write_scores(
    run_dir: str | Path, scores: list[Score], *, train_data: str, test_data: str
) -> list[Path]:
    """Merge scores into the run's scores.json, private ones into confidential/scores.json.

    An entry is replaced by a new one of the same (name, protocol, train_data, test_data).

    Args:
        train_data: name of the store that a probe was fitted to, or ``NOTHING_FITTED``.
        test_data: name of the test store.

    Returns:
        The files written.

    Raises:
        CheckpointError: ``run_dir`` is not a run, or a file there cannot be read or written.
    """
    root = Path(run_dir)
    base = run_base(root)
    if base is None:
        raise CheckpointError(
            f"scores: {root} is not a run; expected a run folder. Check the path."
        )
    written = []
    for visibility, folder in (("public", base), ("private", root / "confidential")):
        new = [
            s.to_dict() | {"train_data": train_data, "test_data": test_data}
            for s in scores
            if s.visibility == visibility
        ]
        if new:
            written.append(merge_entries(folder / "scores.json", new))
    return written


def write_class_scores(run_dir: str | Path, found: "ClassScores", test_data: str) -> Path:
    """Write a classifier's figures per class into its run's class_scores.json, or if they are
    private into confidential/class_scores.json, in place of those on a test store of that name.

    Raises:
        CheckpointError: ``run_dir`` is not a run, or the file there cannot be read or written.
    """
    base = run_base(Path(run_dir))
    if base is None:
        raise CheckpointError(
            f"scores: {run_dir} is not a run; expected a run folder. Check the path."
        )
    folder = base if found.visibility == "public" else Path(run_dir) / "confidential"
    path = folder / CLASS_SCORES
    files.write_json(path, read_class_scores(folder) | {test_data: found.to_dict()})
    return path


def read_class_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the figures per class in a folder by the name of the test store; {} if there are none.

    Raises:
        CheckpointError: the file was not written by ``write_class_scores``.
    """
    path = folder / CLASS_SCORES
    if not path.exists():
        return {}
    try:
        found = parse_json(path.read_text())
        for one in found.values():
            assert {"rows", "images", "units", "class_names", "visibility"} <= one.keys()
        return found
    except (OSError, ValueError, AttributeError, AssertionError) as error:
        remedy = remedy_for(error, "Move it away and evaluate again.")
        raise CheckpointError(f"scores: {path} cannot be read ({error!r}). {remedy}") from None


def read_releases(root: Path) -> list[dict[str, Any]]:
    """Read the releases of scores in a run's folder, oldest first; [] if there are none.

    Raises:
        CheckpointError: ``root`` is not the folder of a run, or the file was not written by
            ``add_release``.
    """
    if run_base(root) != root:
        raise CheckpointError(
            f"scores: {root} is not the folder of a run that may be released; expected one, which "
            f"gets {RELEASED}. Check the path."
        )
    path = root / RELEASED
    if not path.exists():
        return []
    try:
        found = parse_json(path.read_text())
        assert found["format"] == _RELEASED_FORMAT
        for one in found["releases"]:
            assert {*KEPT} <= one.keys()
        return found["releases"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        remedy = remedy_for(error, "Restore it as it was written: its releases are charged.")
        raise CheckpointError(f"scores: {path} cannot be read ({error!r}). {remedy}") from None


def add_release(root: Path, entry: dict[str, Any]) -> None:
    """Add a release to a run's file, to which other processes may add theirs meanwhile. Raises
    CheckpointError as ``read_releases``.
    """
    with files.locked(root):
        releases = [*read_releases(root), entry]
        files.write_json(root / RELEASED, {"format": _RELEASED_FORMAT, "releases": releases})


def note_scored(spec: str | Path, test_store: "Store") -> None:
    """Record the id of a private test store in the run whose weights, at ``spec`` (the run or a
    checkpoint), are scored on it: in confidential/scored_stores.json. Do nothing for other weights.

    Raises:
        CheckpointError: the file there cannot be read or written.
    """
    path = Path(spec).resolve()
    # RUN/checkpoints/STEP, or RUN/confidential/checkpoints/STEP
    root = next((one for one in (path, *path.parents[:3]) if run_base(one) is not None), None)
    if path.exists() and root is not None and test_store.results_visibility == "private":
        with files.locked(root):
            ids = sorted({*_scored_ids(root), test_store.store_id})
            files.write_json(root / _SCORED, ids)


def scored_in_confidence(root: Path, test_store: "Store") -> bool:
    """Return whether a run had confidential scores on a test store, known by its id; or, since
    older versions noted no ids, on one of its name.
    """
    folder, name = root / files.CONFIDENTIAL, test_store.path.resolve().name
    named = [entry["test_data"] for entry in read_scores(folder / "scores.json")]
    return test_store.store_id in _scored_ids(root) or name in [*named, *read_class_scores(folder)]


def _scored_ids(root: Path) -> list[str]:
    path = root / _SCORED
    if not path.exists():
        return []
    try:
        found = parse_json(path.read_text())
        assert isinstance(found, list) and all(isinstance(one, str) for one in found)
        return found
    except (OSError, ValueError, AssertionError) as error:
        remedy = remedy_for(error, "Restore it as it was written.")
        raise CheckpointError(f"scores: {path} cannot be read ({error!r}). {remedy}") from None


def check_out(out: Path, private: bool) -> None:
    """Refuse an unusable output path before any work is done."""
    if private:
        require_confidential(out, "evaluate", "scores of private images")
    files.check_out(out, "evaluate", ".json")
    read_scores(out)


def merge_entries(path: Path, entries: list[dict[str, Any]]) -> Path:
    """Add entries (fields of Score, train_data, test_data) to a file of scores, replacing those
    with the same key.

    Raises:
        CheckpointError: the file cannot be read or written.
    """
    merged = {_key(entry): entry for entry in [*read_scores(path), *entries]}
    files.write_json(path, list(merged.values()))
    return path


def read_scores(path: Path) -> list[dict]:
    """Read the entries of a scores.json (fields of Score, train_data, test_data); [] if there is no
    file.

    Raises:
        CheckpointError: the file was not written by ``write_scores``.
    """
    if not path.exists():
        return []
    try:
        entries = parse_json(path.read_text())
        for entry in entries:
            texts = *_key(entry), entry["visibility"]
            numbers = [entry[name] for name in ("value", "low", "high", "chance", "n")]
            if not (
                all(isinstance(text, str) for text in texts)
                and all(type(number) in (int, float) for number in numbers)
            ):
                raise TypeError("a text or number of another kind")
        return list(entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = remedy_for(error, "Move it away and evaluate again.")
        raise CheckpointError(f"scores: {path} cannot be read ({error!r}). {remedy}") from None


def _key(entry: dict) -> tuple[str, str, str, str]:
    return entry["name"], entry["protocol"], entry["train_data"], entry["test_data"]

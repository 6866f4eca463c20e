"""What SACRO-ML reads to attack a classifier: probabilities of the training images, and of others.

SACRO-ML (https://github.com/AI-SDC/SACRO-ML, read in version 2.0.1) takes a folder with
target.yaml, which names arrays as CSV files without a header. Its worst-case attack needs the two
arrays of probabilities and nothing else; its other attacks need a model of scikit-learn or PyTorch.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dpvision.checkpoint import load_checkpoint
from dpvision.data.image_files import store_images
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.encoders.classifier import ImageClassifier, load_classifier
from dpvision.encoders.predict import predict_files
from dpvision.errors import DataError
from dpvision.eval.scored_run import check_unseen, trained_store
from dpvision.export.product import refused, require_new, stated
from dpvision.files import disk_refusals, new_folder
from dpvision.privacy.plan import DPPlan
from dpvision.runs.folder import require_confidential, settings_of_checkpoint
from dpvision.runs.store_checks import rows_to_draw

_LOGISTIC = {
    "attack_model": "sklearn.linear_model.LogisticRegression",
    "attack_model_params": {"max_iter": 200},
    "test_prop": 0.5,
}
_ATTACKS = {
    "attacks": [
        {"name": "worstcase", "params": {"output_dir": "random_forest"}},
        {"name": "worstcase", "params": {"output_dir": "logistic_regression", **_LOGISTIC}},
    ]
}
"""By the tool's default, and by a smaller model that is fitted better with few images."""


def write_target(
    run: str | Path,
    folder: str | Path,
    test: str | Path,
    *,
    ema: bool = False,
    encoder: str | None = None,
    progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Path:
    """Write a new folder for ``sacroml run``, and return the path of its target.yaml.

    It holds the probabilities of all readable images, the attack's settings, and the run's
    statement if it has one.

    Args:
        folder: its path needs a folder named confidential if an image or the weights are private.
        test: store of images that the run was not trained on.
        ema, encoder: as for ``load_classifier``.
        progress: called with "training images" or "other images", the number done, and of how many.

    Raises:
        ConfigError: the run is no classifier with one class an image, or the folder is not empty,
            or not confidential where it must be.
        DataError: a store cannot be read, the training store is not at its place, or ``test``
            shares images with it.
        CheckpointError: there is no run or checkpoint, it was altered, or the disk refuses.
        PrivacyError: the run cannot be stated (``make_statement``).
    """
    run, folder = Path(run), Path(folder)
    require_new(folder)
    checkpoint = load_checkpoint(run)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classifier = load_classifier(checkpoint, encoder=encoder, ema=ema, device=device)
    if classifier.multi_label:
        raise refused("sacro", "several classes an image", "Attack a run with one class an image.")
    config, own = settings_of_checkpoint(checkpoint), checkpoint.manifest["lineage"][-1]
    trained, other = trained_store(config.data), open_store(test)
    if trained is None or trained.store_id != own["store_id"]:
        raise DataError(
            f"export: --to sacro: {config.data.store} is not the store that {run} was trained on; "
            "expected its images, whose probabilities are attacked. Put the store back."
        )
    check_unseen(config.data, other, "export")
    if classifier.confidential or "private" in (trained.visibility, other.results_visibility):
        require_confidential(folder, "export", "probabilities of single private images")
    unit = DPPlan.from_dict(checkpoint.manifest["plan"]).unit
    drawn = np.asarray(rows_to_draw(trained, unit, config.seed))
    parts = {
        "train": ("training images", trained, drawn[trained.labelled[drawn]]),
        "test": ("other images", other, np.arange(other.num_records)),
    }
    target: dict[str, object] = {
        "dataset_name": f"{classifier.run['recipe']}, run {classifier.run['run_id']}",
        "dataset_module_path": "",
        "features": {},
        "safemodel": [],
    }
    remedy = "Free some, or choose another folder."
    with disk_refusals("export", folder, remedy), new_folder(folder, mode=0o700) as folder_of:
        for part, (what, store, row_N) in parts.items():
            probability_NK = _probabilities(classifier, store, row_N, partial(progress, what))
            name = target[f"proba_{part}_path"] = f"proba_{part}.csv"
            np.savetxt(folder_of / name, probability_NK, fmt="%.9g", delimiter=",")
        files = {"target.yaml": target, "attack.yaml": _ATTACKS}  # JSON is YAML too
        if not classifier.confidential:
            files["statement.json"] = stated(run)
        for name, value in files.items():
            (folder_of / name).write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    return folder / "target.yaml"


def _probabilities(
    classifier: ImageClassifier,
    store: Store,
    row_N: np.ndarray,
    progress: Callable[[int, int], object],
) -> np.ndarray:
    """Return the probabilities of the readable images among a store's rows, float64 (N, K)."""
    made = []
    for done, one in enumerate(predict_files(classifier, store_images(store, row_N.tolist())), 1):
        if one.problem is None:
            made.append(one.probabilities)
        progress(done, len(row_N))
    if not made:
        raise DataError(
            f"export: --to sacro: {store.path} has no readable image; expected one or more. Give "
            "another store."
        )
    return np.array(made)

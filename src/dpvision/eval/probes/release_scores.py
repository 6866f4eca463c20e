"""Release a classifier's scores on private test images: one table of counts with noise.

Each image has one cell in a table of declared group, declared class, predicted class and bin of the
predicted class's probability; with several attributes there is a table for each. A unit (person)
adds the mean over its images, so that its part of a table has L1 norm 1, and each of A tables is
scaled by 1 / sqrt(A): a unit's whole contribution has L2 norm 1 at most, however many images it
has. The sum is one full-batch Gaussian release, charged to the test store before the first image is
scored. All figures follow from the noisy table (``eval.noisy_counts``).

Legend: N images, A attributes, G groups of an attribute, K classes, J bins.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import PrivacyConfig
from dpvision.data.class_names import all_names
from dpvision.data.declared import check_declared, count_units, has_units, rounded_up
from dpvision.data.decode import BadImage, decode
from dpvision.data.ordered import ordered_map
from dpvision.data.store import SHARED_KEPT, Store
from dpvision.dp.clipped import ClippedSum, once, seal
from dpvision.dp.noise import privatize
from dpvision.encoders.calibration import read_calibration, weights_of
from dpvision.encoders.classifier import ImageClassifier, load_classifier
from dpvision.encoders.feature_file import Extraction
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError, PrivacyError
from dpvision.eval.class_scores import ALL
from dpvision.eval.groups import read_groups
from dpvision.eval.noisy_counts import DECIMALS, NUM_BINS, NoisyCounts, bin_edges, figures_of
from dpvision.eval.probes.own_head import model_of, scorable
from dpvision.eval.probes.records import units
from dpvision.eval.score_file import add_release, read_releases, scored_in_confidence
from dpvision.eval.scored_run import trained_store
from dpvision.files import write_file
from dpvision.privacy import gaussian
from dpvision.privacy.account import charge_of
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import DPPlan, default_delta, make_plan
from dpvision.privacy.printed import up
from dpvision.privacy.refusal import MAX_EPSILON
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.privacy.stream import Key, new_key
from dpvision.runs.folder import settings_of_checkpoint
from dpvision.runs.store_checks import check_people, check_store

OTHER = "(other)"
"""Group of images whose value is not among the declared ones, or not known."""
ALONE = Extraction(batch_size=1, workers=2, device="cpu")
_MOST_CELLS = 100_000
_WHOLE = 2**24
"""A unit's contribution in integers, whose sums are exact."""

Cells = np.ndarray
"""int64 (N, A): each image's cell in each table, flat; -1 for an image without a score."""


def release_scores(
    run_dir: str | Path,
    store: Store,
    epsilon: float,
    *,
    dataset_size: int | None = None,
    num_units: int | None = None,
    delta: float | None = None,
    declared: Mapping[str, Sequence[str]] | None = None,
    groups: Path | None = None,
    ema: bool = False,
    hardware: Extraction = ALONE,
    noise_key: Key | None = None,
) -> dict[str, Any]:
    """Score a run's classifier on a private store, release the noisy table and add it to
    RUN/released_scores.json; return what was added (docs/evaluation.md has its entries).

    Args:
        epsilon: of this release, for a unit; above 0, at most 20.
        dataset_size, num_units: declared numbers of images and, for a store with persons, persons.
        delta: if None, ``privacy.plan.default_delta``.
        declared: the values of each attribute; images with another one are in group ``OTHER``.
        groups: the table of the attributes, as for ``eval.groups.read_groups``.
        hardware: its images per pass are not read: each image is scored alone. The counts that
            ``progress`` receives are private.
        noise_key: secret key of the noise; if None, a new one.

    Raises:
        ConfigError: a setting is out of range or missing, the store is public, or the run is
            multi-label or no classifier.
        DataError: the store is not as declared, or the run cannot be scored on it.
        PrivacyError: the run's weights, or the choice of the store's images, have no guarantee, or
            the store's cap refuses the release. Nothing has been charged.
    """
    root, declared = Path(run_dir), declared or {}
    checkpoint = load_checkpoint(root)
    config = settings_of_checkpoint(checkpoint)
    read_releases(root)  # else what is released could not be written
    classifier = load_classifier(checkpoint, ema=ema, device=hardware.device)
    _check(classifier, store, epsilon)
    check_declared(
        classifier.window, False, store, "evaluate", "the images that the run was trained on"
    )
    same_import = checkpoint.manifest["lineage"][-1]["store_id"] == store.store_id
    trained = trained_store(config.data)
    if same_import and (trained is None or trained.store_id != store.store_id):
        raise DataError(
            f"evaluate: --release with {store.path}, of the same import as the run's training "
            f"images, which are not at {config.data.store}; expected them there: which images were "
            "trained on cannot be seen otherwise. Put the training store back, or a link to it."
        )
    numbered, row_N = scorable(config, store, checkpoint.manifest)
    num_classes = model_of(config).num_classes or 0
    scored = _scored(checkpoint, ema, num_classes)
    for attribute, values in declared.items():
        if attribute == ALL or OTHER in values:
            raise ConfigError(
                f"evaluate: --by {attribute}={':'.join(values)}; expected neither a column "
                f"{ALL!r} nor the value {OTHER!r}, which the release uses itself. "
                "Rename it in the table."
            )
    tables = {name: (*values, OTHER) for name, values in declared.items()} or {ALL: (ALL,)}
    if (cells := max(map(len, tables.values())) * num_classes**2 * NUM_BINS) > _MOST_CELLS:
        raise ConfigError(
            f"evaluate: --release with {cells:,} counts in a table; expected at most "
            f"{_MOST_CELLS:,}, of which each has noise. Declare fewer groups; a run of more than "
            "100 classes cannot be scored so."
        )
    group_NA = _groups(tables, groups, numbered, row_N)
    plan = _plan(store, epsilon, dataset_size, num_units, delta)
    check_store(plan, store, np.arange(store.num_records))
    if plan.unit.draws_people:
        check_people(store)
    seen = scored_in_confidence(root, store)

    run_id = secrets.token_hex(8)
    with Ledger.open(store.path, run_id, plan, resume=False) as ledger:
        name = StoreLedgers.of(store.path).name_path(run_id)
        write_file(name, f"{root} (released scores)".encode())
        step = ledger.append()
        # Of releases at the same time, each counts what was charged before its own total is made.
        charge = charge_of(store.path, plan, besides=[run_id])
        cell_NA = _cells(classifier, numbered, row_N, group_NA, hardware)
        total = clipped_counts(cell_NA, units(store)[row_N], tables, num_classes, plan)
        noisy = privatize(
            total, plan, step, new_key() if noise_key is None else noise_key, dtype=torch.float64
        )
    made = noisy_counts(noisy.grads, tables, num_classes, plan)
    names = all_names(checkpoint.manifest.get("class_names"), num_classes)
    entry = {
        "run_id": run_id,
        "store_id": store.store_id,
        "plan": plan.to_dict(),
        "charged": asdict(charge),
        "confidential_scores_first": seen,
        **scored,
        **figures_of(made, names),
    }
    add_release(root, entry)
    return entry


def release_plan(
    epsilon: float, dataset_size: int, num_units: int | None = None, delta: float | None = None
) -> DPPlan:
    """Return the plan of one release: one full batch of units, clipped to 1, with the exact noise.

    Raises:
        ConfigError, PrivacyError: as ``make_plan``.
    """
    population = dataset_size if num_units is None else num_units
    delta = default_delta(population) if delta is None else delta
    asked = PrivacyConfig(
        dataset_size=dataset_size,
        num_units=num_units,
        # All images of a person count, with the weight of one.
        max_records_per_unit=1 if num_units is None else dataset_size,
        sampling_unit="record" if num_units is None else "person",
        expected_batch_size=population,
        sampling="full_batch",
        steps=1,
        max_grad_norm=1.0,
        delta=delta,
        target_epsilon=epsilon,
    )
    noise = gaussian.full_batch_noise(epsilon, delta, 1)
    return make_plan(replace(asked, target_epsilon=None, noise_multiplier=noise))


def clipped_counts(
    cell_NA: Cells,
    unit_N: np.ndarray,
    tables: Mapping[str, Sequence[str]],
    num_classes: int,
    plan: DPPlan,
) -> ClippedSum:
    """Return the sum of the units' contributions, by attribute: secret, flat, float64.

    Args:
        unit_N: images of one unit have the same number.
        tables: the groups of each attribute.
    """
    whole = math.floor(_WHOLE / math.sqrt(len(tables)))
    id_U, unit_N = np.unique(unit_N, return_inverse=True)
    square_U, sums = np.zeros(len(id_U)), {}
    for (name, groups), cell_N in zip(tables.items(), cell_NA.T, strict=True):
        scored_N = cell_N >= 0
        images_U = np.bincount(unit_N[scored_N], minlength=len(id_U))
        # For each unit and each cell with images of it: their share, rounded down.
        pair_NX = np.stack([unit_N[scored_N], cell_N[scored_N]], axis=1)
        pair_PX, images_P = np.unique(pair_NX, axis=0, return_counts=True)
        weight_P = _weights(images_P, images_U[pair_PX[:, 0]], whole)
        total = np.zeros(len(groups) * num_classes**2 * NUM_BINS, dtype=np.int64)
        np.add.at(total, pair_PX[:, 1], weight_P)
        np.add.at(square_U, pair_PX[:, 0], (weight_P / _WHOLE) ** 2)
        sums[name] = torch.from_numpy(total / _WHOLE)
    norm_U = torch.from_numpy(np.sqrt(square_U)).float()
    return seal(ClippedSum(sums, len(id_U), norm_U, torch.zeros(0), plan.max_grad_norm, once(id_U)))


def _weights(images_P: np.ndarray, of_unit_P: np.ndarray, whole: int) -> np.ndarray:
    """Weight of some of a unit's images, all of which have the weight ``whole``."""
    return whole * images_P // of_unit_P


def noisy_counts(
    released: Mapping[str, torch.Tensor],
    tables: Mapping[str, Sequence[str]],
    num_classes: int,
    plan: DPPlan,
) -> list[NoisyCounts]:
    """Return the released tables as numbers of units, rounded to four decimals."""
    scale = math.sqrt(len(tables))
    made = []
    for name, groups in tables.items():
        count = released[name].numpy() * plan.expected_batch_size * scale
        shape = (len(groups), num_classes, num_classes, NUM_BINS)
        made.append(
            NoisyCounts(
                name, tuple(groups), count.reshape(shape).round(DECIMALS), plan.noise_std * scale
            )
        )
    return made


def _scored(checkpoint: Checkpoint, ema: bool, num_classes: int) -> dict[str, Any]:
    """Which weights were scored, and with which calibration."""
    made = read_calibration(checkpoint, ema, num_classes)
    return {
        "weights": weights_of(checkpoint, ema),
        "averaged_weights": ema,
        "calibration": made and {"temperature": made.temperature, "offset": made.offset},
        "ledger_steps": checkpoint.manifest["ledger_steps"],
        "ledger_digest": checkpoint.manifest["ledger_digest"],
    }


def _check(classifier: ImageClassifier, store: Store, epsilon: float) -> None:
    """Refuse what has no release, or needs none."""
    if not 0 < epsilon <= MAX_EPSILON:
        raise ConfigError(
            f"evaluate: --release {epsilon}; expected an epsilon above 0 and at most "
            f"{up(MAX_EPSILON)}. Use 1."
        )
    if store.results_visibility == "public":
        raise ConfigError(
            f"evaluate: --release with {store.path}, whose images are public; expected a private "
            "store: scores of public images may be released as they are. Drop --release."
        )
    if store.visibility == "public":
        raise PrivacyError(
            f"evaluate: --release with {store.path}, which was cleared of images of a private "
            "store; expected a private store: the release covers who is in the test store, not "
            "which images were removed. Test on a store that was not cleared."
        )
    if SHARED_KEPT in store.meta:
        raise PrivacyError(
            f"evaluate: --release with {store.path}, imported with --shared-images first; expected "
            "a store without: a person's images decide which images of others are in it, and the "
            "noise is for the person's own. Give each image one person in the source, and import "
            "again without --shared-images."
        )
    if classifier.confidential:
        raise PrivacyError(
            "evaluate: --release with weights that were trained on private images without a "
            "guarantee; expected weights that may be released: the noise covers the test images "
            "only. Train with a guarantee, or drop --release."
        )
    if classifier.multi_label:
        raise ConfigError(
            "evaluate: --release with a multi-label run; expected one class for an image. Drop "
            "--release: the figures are then confidential."
        )


def _plan(
    store: Store,
    epsilon: float,
    num_records: int | None,
    num_units: int | None,
    delta: float | None,
) -> DPPlan:
    """Return the plan of the declared numbers, or refuse with those to declare."""
    people = has_units(store)
    if num_records is None or (people and num_units is None):
        row_N, persons = np.arange(store.num_records), ""
        if people:
            persons = f" --privacy.num-units {rounded_up(count_units(store, row_N))}"
        raise DataError(
            f"evaluate: the numbers of {'images and persons' if people else 'images'} of the test "
            "store are not declared; expected them with --release: they set delta and are "
            f"published. {OPERATOR_ONLY}give --privacy.dataset-size "
            f"{rounded_up(store.num_records)}{persons}."
        )
    return release_plan(epsilon, num_records, num_units, delta)


def _groups(
    tables: Mapping[str, Sequence[str]], table: Path | None, store: Store, row_N: np.ndarray
) -> np.ndarray:
    """Number of each image's group in each table, int64 (N, A)."""
    if table is None:
        return np.zeros((len(row_N), 1), dtype=np.int64)
    value_AN = read_groups(table, list(tables), store, row_N)
    group_NA = np.empty((len(row_N), len(tables)), dtype=np.int64)
    for at, (name, groups) in enumerate(tables.items()):
        number = {value: g for g, value in enumerate(groups)}
        group_NA[:, at] = [number.get(v, len(groups) - 1) for v in value_AN[name].tolist()]
    return group_NA


@torch.no_grad()
def _cells(
    classifier: ImageClassifier,
    store: Store,
    row_N: np.ndarray,
    group_NA: np.ndarray,
    hardware: Extraction,
) -> Cells:
    """Cells of the images. Each is scored in a pass of its own: with others in the pass, the last
    bits of its probabilities, and so its cell, could depend on them.
    """
    num_classes, label_N = len(classifier.class_names), store.labels[row_N]
    inner_J = bin_edges(num_classes)[1:-1]

    def read(row: int) -> np.ndarray | None:
        try:
            return classifier.preprocess(decode(store.read(row)))
        except BadImage:
            return None

    cell_NA = np.full_like(group_NA, -1)
    opened = ordered_map(read, row_N.tolist(), workers=hardware.workers, ahead=32)
    for at, x_CHW in enumerate(opened):
        if x_CHW is not None:
            x_BCHW = torch.from_numpy(x_CHW)[None].to(hardware.device)
            probability_K = classifier.probabilities(x_BCHW)[0].double().cpu().numpy()
            if np.isfinite(probability_K).all():
                best = int(probability_K.argmax())
                bin_ = int(np.searchsorted(inner_J, probability_K[best], side="right"))
                in_group = (int(label_N[at]) * num_classes + best) * NUM_BINS + bin_
                cell_NA[at] = group_NA[at] * num_classes**2 * NUM_BINS + in_group
        if hardware.progress is not None:
            hardware.progress(at + 1)
    return cell_NA

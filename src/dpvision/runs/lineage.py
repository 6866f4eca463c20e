"""The lineage that a run inherits from its initial weights, and which weights a private run refuses
(docs/privacy.md).

A lineage is a list of entries, oldest first, one for each run that trained the weights, or for
weights without a lineage:

    store_id, visibility ("private", "public", or "undeclared": weights without a lineage or a
    declaration), licence, run_id, guarantee: None, or the run's {epsilon, epsilon_rdp, delta,
    steps, plan, total}; the plan lets runs be composed, and total covers all
        runs up to this one on the same store,
    declared: for weights without a lineage, who declared them public, and their source.
    exported: of weights without a lineage which dpvision exported, as their metadata says,
    clock: of an entry without a guarantee that ``lineage_of_results`` adds, the checkpoint's name.

Weights of runs without a guarantee are recognised also in files that another program saved without
lineage. LEDGERS/<store_id>/unprotected-<run_id>.json beside the store holds digests of the tensors
that such a run changed, for every checkpoint, written before the checkpoint. One unchanged tensor
is enough; changed numbers (plus 1e-9) are not detected. Stores in one folder share LEDGERS, so
weights trained on one of them are recognised for all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dpvision.data.store import CURATION, SHARED_KEPT, Store
from dpvision.errors import ConfigError, PrivacyError
from dpvision.files import make_folders, write_json
from dpvision.privacy.composition import Part, check_total, parts_of, total_epsilon
from dpvision.privacy.marks import read_json
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.runs.folder import held_back
from dpvision.weights import Lineage, contents

_FORM = "NAME; LICENCE; SOURCE"
UNPROTECTED_FORMAT = "dpvision-unprotected-weights-1"
_PREFIX = "unprotected-"


@dataclass(frozen=True)
class Declaration:
    """An operator's declaration that weights without a lineage are public."""

    name: str
    licence: str
    source: str

    @classmethod
    def parse(cls, text: str) -> "Declaration":
        """Parse the text of ``RunConfig.public_weights``.

        Raises:
            ConfigError: the text does not have three parts.
        """
        parts = [part.strip() for part in text.split(";")]
        if len(parts) != 3 or not all(parts):
            raise ConfigError(
                f"run: public_weights={text!r}; expected three parts, {_FORM!r}. E.g. "
                "--public-weights 'MAE ViT-B; CC-BY-NC 4.0; "
                "https://github.com/facebookresearch/mae'."
            )
        return cls(*parts)


def inherit(
    lineage: Sequence[dict[str, Any]],
    store: Store,
    plan: DPPlan,
    *,
    declaration: str | None = None,
    allow_weak: bool = False,
    tensors: Iterable[Tensor] = (),
) -> Lineage:
    """Return the lineage of a new run's initial weights, with the operator's declaration; refuse
    weights that spoil the guarantee.

    Args:
        lineage: lineage of the weights.
        store: the store this run trains on.
        plan: this run's plan.
        declaration: ``RunConfig.public_weights``.
        allow_weak: ``PrivacyConfig.allow_weak_guarantee``.
        tensors: the weights, compared with those of earlier runs without a guarantee on ``store``
            and on its neighbours.

    Returns:
        The entries, oldest first.

    Raises:
        ConfigError: a declaration for weights that carry a lineage, which decides.
        PrivacyError: weights without a lineage and without a declaration, or exported by dpvision
            and saved again without it; or this run is private and the weights were trained on this
            store, or any private one, without a guarantee, or are of a checkpoint that the clock
            asked for; or the total of all runs is refused.
    """
    declared = None if declaration is None else Declaration.parse(declaration)
    if declared is not None and not any(entry["visibility"] == "undeclared" for entry in lineage):
        raise ConfigError(
            f"run: public_weights={declaration!r}; expected none: these weights carry their own "
            "lineage, which decides. Leave it out."
        )
    made = [_declare(entry, declared) for entry in lineage]
    if plan.guarantee != "dp":
        return made
    for entry in made:
        if "clock" in entry:
            raise PrivacyError(
                f"lineage: the parent, {entry['clock']} of run {entry['run_id'][:8]}, was written "
                "by the clock, whose steps depend on private batches; expected a checkpoint of "
                "the plan's end, or of a stop by a signal. Go on with --resume; Ctrl-C then writes "
                "one that may leave."
            )
        if _spoils(entry, store):
            raise PrivacyError(
                f"lineage: the parent touched store {entry['store_id'][:8]} "
                f"({entry['visibility']}) without a guarantee; expected a parent trained on "
                "public stores or with differential privacy. Start from another checkpoint, or "
                "from scratch."
            )
    for entry in runs_with_these_weights(store, tensors):
        if _spoils(entry, store):
            raise PrivacyError(
                f"lineage: the parent has tensors of run {entry['run_id'][:8]}, which trained on "
                f"store {entry['store_id'][:8]} ({entry['visibility']}) without a guarantee; "
                "expected none of them. Start from another checkpoint, or from scratch."
            )
    for store_id in private_stores(made):
        runs_on(made, store_id)  # raises before a step is charged if something is missing
    check_total(
        parts_of([*runs_on(made, store.store_id), (plan, plan.steps)]), allow_weak=allow_weak
    )
    return made


def runs_on(lineage: Iterable[dict[str, Any]], store_id: str) -> tuple[Part, ...]:
    """Return plans and stated steps (``composition.parts_of``) of the private runs on a store in a
    lineage.

    Raises:
        PrivacyError: an entry has a guarantee without its plan or steps.
    """
    found = []
    for entry in lineage:
        guarantee = entry["guarantee"]
        if guarantee is None or entry["store_id"] != store_id:
            continue
        if "plan" not in guarantee or "steps" not in guarantee:
            raise PrivacyError(
                f"lineage: run {entry['run_id']} on store {store_id[:8]} has a guarantee without "
                "its plan and steps; expected both, to add up later runs. Train the parent with "
                "this version."
            )
        found.append((DPPlan.from_dict(guarantee["plan"]), int(guarantee["steps"])))
    return parts_of(found)


def private_stores(lineage: Iterable[dict[str, Any]]) -> list[str]:
    """Ids of the private stores that the weights were trained on with a guarantee, in order."""
    return list(
        dict.fromkeys(
            e["store_id"]
            for e in lineage
            if e["visibility"] == "private" and e["guarantee"] is not None
        )
    )


def lineage_of_results(lineage: Sequence[dict[str, Any]], path: Path) -> Lineage:
    """Return the lineage of what is computed from a checkpoint: its own, and for one that must not
    leave (``held_back``) an entry without a guarantee, so that no result leaves either.

    Args:
        path: the checkpoint's folder, or a file in it.
    """
    if not lineage or shaped_in_confidence(lineage) or not held_back(path):
        return list(lineage)
    name = next(part for part in reversed(path.resolve().parts) if part.startswith("step-"))
    return [*lineage, lineage[-1] | {"visibility": "private", "guarantee": None, "clock": name}]


def shaped_in_confidence(lineage: Iterable[dict[str, Any]]) -> bool:
    """Return whether weights were trained on private records without a guarantee, or are of a
    checkpoint that must not leave: everything computed with them is then private too.
    """
    return any(entry["visibility"] == "private" and entry["guarantee"] is None for entry in lineage)


def own_entry(
    plan: DPPlan,
    store: Store,
    run_id: str | None,
    steps: int,
    inherited: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Lineage entry of a run itself, after ``steps`` charged steps of ``plan`` on ``store``;
    ``inherited`` is its start's lineage. Its epsilons are the stated ones, of the whole plan.
    """
    guarantee = None
    if plan.guarantee == "dp":
        spent = plan.spent(plan.stated_steps(steps))
        epsilon, delta, method = total_epsilon(
            parts_of([*runs_on(inherited, store.store_id), (plan, steps)])
        )
        guarantee = {
            "epsilon": spent.epsilon,
            "epsilon_rdp": spent.epsilon_rdp,
            "delta": plan.delta,
            "steps": steps,
            "plan": plan.to_dict(),
            "total": {"epsilon": epsilon, "delta": delta, "method": method},
        }
    return store_entry(store, run_id, guarantee)


def store_entry(
    store: Store, run_id: str | None, guarantee: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the lineage entry of a store: of a run on it, or of public images that were read
    otherwise (no ``run_id``).
    """
    return {
        "store_id": store.store_id,
        "visibility": store.visibility,
        "licence": store.licence,
        "run_id": run_id,
        "guarantee": guarantee,
        **({"deduplicated": store.meta["deduplicated"]} if "deduplicated" in store.meta else {}),
        **{name: store.meta[name] for name in (SHARED_KEPT, CURATION) if name in store.meta},
    }


def named_weights(name: str, licence: str | None) -> dict[str, Any]:
    """Lineage entry of weights that a library downloaded under a public name.

    Args:
        name: the encoder's name in tables, e.g. "timm:vit_base_patch16_224.augreg_in21k"; not a
            path of the operator's machine.
        licence: as stated by the library, or None.
    """
    declared = {"by": "name", "name": name, "source": "the library's cache"}
    return _weights_entry(name, "public", licence) | {"declared": declared}


def public_weights(name: str, licence: str | None) -> dict[str, Any]:
    """Lineage entry of weights that dpvision computes from public data, such as the constants of
    patches.
    """
    return _weights_entry(name, "public", licence)


def image_files(name: str, *, public: bool) -> dict[str, Any]:
    """Lineage entry of images that an evaluation trains on without a guarantee.

    Args:
        name: name of their file or folder, without the path.
        public: whether the operator declared them public.
    """
    return _weights_entry(name, "public" if public else "private", None) | {
        "store_id": f"images:{name}"
    }


def undeclared_weights(name: str, licence: str | None = None) -> dict[str, Any]:
    """Lineage entry of weights from a file without a lineage: a run that starts from them needs a
    declaration (``inherit``).

    Args:
        licence: as stated beside the file, or None.
    """
    return _weights_entry(name, "undeclared", licence)


def without_lineage(entry: dict[str, Any], metadata: Any) -> dict[str, Any]:
    """Return the lineage entry of weights that carry none, marked if their metadata says that
    they were exported from here: their lineage was lost, and no declaration replaces it.
    """
    exported = isinstance(metadata, dict) and "dpvision.statement" in metadata
    return entry | {"exported": True} if exported else entry


def _spoils(entry: dict[str, Any], store: Store) -> bool:
    """Return whether a private run on ``store`` must not start from weights with this entry."""
    return entry["guarantee"] is None and (
        entry["visibility"] == "private" or entry["store_id"] == store.store_id
    )


def _declare(entry: dict[str, Any], declared: Declaration | None) -> dict[str, Any]:
    name = entry["store_id"].removeprefix("weights:")
    if entry.get("exported"):
        raise PrivacyError(
            f"lineage: {name} carries no lineage, but its metadata says that dpvision exported it; "
            "expected the lineage of the exported file, which was lost when another program saved "
            "the weights again. Open the exported folder, or the run's folder."
        )
    if entry["visibility"] != "undeclared":
        return entry
    if declared is None:
        raise PrivacyError(
            f"lineage: {name} carries no lineage, so the images it was trained on are unknown; "
            "expected your declaration that they are public, which the statement repeats. Pass "
            f"--public-weights '{_FORM}', or name a run folder."
        )
    licence, stated = declared.licence, entry["licence"]
    if stated is not None and stated.casefold() != licence.casefold():
        licence += f" (declared; the weights' folder states {stated})"
    return entry | {
        "visibility": "public",
        "licence": licence,
        "declared": {"by": "operator", **_without_licence(declared)},
    }


def _without_licence(declared: Declaration) -> dict[str, str]:
    return {name: value for name, value in asdict(declared).items() if name != "licence"}


def _weights_entry(name: str, visibility: str, licence: str | None) -> dict[str, Any]:
    return {
        "store_id": f"weights:{name}",
        "visibility": visibility,
        "licence": licence,
        "run_id": None,
        "guarantee": None,
    }


def remember_weights(
    store: Store, run_id: str, tensors: Iterable[Tensor], start: Iterable[str]
) -> None:
    """Add the digests of a checkpoint's tensors to the file of a run without a guarantee on
    ``store``; durable when this returns.

    Args:
        start: digests (``weights.contents``) of the weights that the run started from, which are
            excluded.

    Raises:
        DataError: not a store. CheckpointError: the file cannot be written.
    """
    ledgers = StoreLedgers.of(store.path)
    path = ledgers.folder / f"{_PREFIX}{run_id}.json"
    known = set(_read_digests(path)["tensors"]) if path.exists() else set()
    made = set(contents(tensors)) - set(start)
    if made <= known:
        return
    make_folders(ledgers.folder)
    about = {
        "format": UNPROTECTED_FORMAT,
        "store_id": store.store_id,
        "visibility": store.visibility,
        "licence": store.licence,
        "run_id": run_id,
    }
    write_json(path, about | {"tensors": sorted(known | made)}, sort_keys=True)


def runs_with_these_weights(store: Store, tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Lineage entries of runs without a guarantee, on ``store`` or a store in the same folder, that
    wrote one of these tensors bit for bit.

    Args:
        tensors: not read if there was no such run.

    Raises:
        DataError: not a store. PrivacyError: a file of digests is damaged.
    """
    files = sorted(StoreLedgers.of(store.path).folder.parent.glob(f"*/{_PREFIX}*.json"))
    given = set(contents(tensors)) if files else set()
    found = []
    for values in map(_read_digests, files):
        if not given.isdisjoint(values["tensors"]):
            found.append(
                {name: values[name] for name in ("store_id", "visibility", "licence", "run_id")}
                | {"guarantee": None}
            )
    return found


def _read_digests(path: Path) -> dict[str, Any]:
    values = read_json(path)
    fields = {"format", "store_id", "visibility", "licence", "run_id", "tensors"}
    if (
        not isinstance(values, dict)
        or values.keys() != fields
        or values["format"] != UNPROTECTED_FORMAT
        or not isinstance(values["tensors"], list)
    ):
        raise PrivacyError(
            f"lineage: {path}: not a file of digests of weights; expected what dpvision wrote. "
            "Restore it from a copy."
        )
    return values

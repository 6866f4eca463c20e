"""Check that a store matches a plan's declared numbers, and that a classifier can be trained on
it.
"""

import numpy as np

from dpvision.config.unit import Unit
from dpvision.data.declared import count_units, fits, has_units, rounded_up, shared_images
from dpvision.data.rows import AllRows, Rows, of_rows
from dpvision.data.store import SHARED_KEPT, Store
from dpvision.errors import OPERATOR_ONLY, DataError
from dpvision.privacy.plan import DPPlan


def check_store(plan: DPPlan, store: Store, rows: Rows) -> None:
    """Refuse a store that is not the declared one: another number of records or units, or units
    that the plan does not declare.

    Declared numbers are public and may be rounded, so 1% is allowed. Truncated Poisson is accounted
    for at most N records, and a full batch of at most N records has the declared N as its divisor.
    The message holds private counts: it is for the operator's terminal, and goes into no file of
    the run.

    Args:
        rows: from ``rows_to_draw``.

    Raises:
        DataError: the counts do not match.
    """
    unit, where = plan.unit, f"store: {store.store_id[:8]}"
    if has_units(store) and not unit.is_person and plan.guarantee == "dp":
        raise DataError(
            f"{where} has units ({store.meta['unit_field']}), and num_units is not declared; "
            "expected it, because the guarantee is for a unit with all its records. Pass "
            "--privacy.num-units M, and --privacy.max-records-per-unit k to use more than one "
            "record of each. `dpvision data inspect STORE` shows numbers to declare."
        )
    if unit.is_person and not has_units(store):
        raise DataError(
            f"{where} has no units, and num_units={unit.num_people} is declared; expected a store "
            "imported with --unit-from FIELD. Import it again with --unit-from, or drop "
            "--privacy.num-units."
        )
    # How many images were removed from a cleared store is private: its original number is the
    # public one.
    num_records = len(rows) if has_units(store) else store.meta.get("cleared_from", len(rows))
    # The score of a selection is a full batch.
    at_most = plan.sampler.law != "poisson" or plan.selection is not None
    people = unit.draws_people
    counts = [("dataset_size", num_records, unit.num_records, at_most and not people, "records")]
    among = ""
    if unit.num_people is not None:
        among = "" if people else f" with max_records_per_unit={unit.max_records}"
        num_people = count_units(store, rows)
        counts.append(("num_units", num_people, unit.num_people, at_most and people, "units"))
    if all(fits(count, declared, at_most=at_most) for _, count, declared, at_most, _ in counts):
        return
    found = " and ".join(f"{count} {noun}" for _, count, _, _, noun in counts)
    rule = " and ".join(
        f"{name}={declared} ({'at most that, ' if at_most else ''}within 1%)"
        for name, _, declared, at_most, _ in counts
    )
    say = " ".join(
        f"--privacy.{name.replace('_', '-')} {rounded_up(count)}" for name, count, *_ in counts
    )
    raise DataError(
        f"{where}: {OPERATOR_ONLY}{found} can take part{among}; expected the declared {rule}. "
        f"Pass {say} (these become public) for a new plan, and check the batch size if batches "
        "are sampled."
    )


def rows_to_draw(store: Store, unit: Unit, seed: int) -> Rows:
    """Return the int64 rows of the records that may be drawn: all of them where people are drawn,
    otherwise at most k of each person (``Store.eligible_rows``).
    """
    if unit.draws_people:
        return AllRows(store.num_records)
    return store.eligible_rows(unit.max_records, seed)


def require_public(store: Store, recipe: str) -> None:
    """Refuse a private store to a recipe that is for public images: without a guarantee, no private
    run could start from its weights.

    Raises:
        DataError: the store was imported without --public.
    """
    if store.visibility != "public":
        raise DataError(
            f"store: {store.path} is private; expected public images, because {recipe} trains "
            "without privacy, and a private run starts from its weights. Pass a store that was "
            "imported with --public; the private images belong to the private run."
        )


def check_people(store: Store) -> None:
    """Refuse a store in which some record does not belong to exactly one person: a plan that draws
    people could not remove one of them.

    The message holds private counts: it is for the operator's terminal, and goes into no file of
    the run.

    Raises:
        DataError: a record has no person, or an image was found under two and the operator did not
            ask to keep it for the first.
    """
    where = f"store: {store.store_id[:8]}: {OPERATOR_ONLY}"
    if missing := int((store.index["unit"] < 0).sum()):
        raise DataError(
            f"{where}{missing} of {store.num_records} records have no "
            f"{store.meta['unit_field']}; expected one each with sampling_unit='person'. Give "
            "every image its person in the source and import again, or leave those images out."
        )
    if SHARED_KEPT not in store.meta and (shared := shared_images(store)):
        raise DataError(
            f"{where}{shared} files have the bytes of an image of another person; expected one "
            "person for each image with sampling_unit='person'. Remove such files from all but "
            "one person and import again, or with --shared-images first."
        )


def check_labels(store: Store, rows: Rows, num_classes: int, *, multi_label: bool = False) -> None:
    """Refuse a store that a classifier cannot be trained on.

    Labels in a private store are private: the message is for the operator's terminal, and goes into
    no file of the run. Nothing is raised during a step (``models.classifier.losses``).

    Args:
        rows: int64 rows that may be drawn.
        multi_label: whether records may have several labels.

    Raises:
        DataError: the store has one label per record and several are expected, or the reverse; it
            names more or fewer classes than the model has; a record is unlabelled (an empty list is
            a label) and the import was without --unknown-classes unlabelled; a label is not a class
            of the model; or all records have the same labels.
    """
    where = f"store: {store.path}"
    if store.multi_label != multi_label:
        got, rule = ("several labels", "one") if store.multi_label else ("one label", "several")
        change = (
            "Pass --model.multi-label (a network: with --model.loss sigmoid)"
            if store.multi_label
            else "Drop --model.multi-label"
        )
        raise DataError(
            f"{where} has {got} a record; expected {rule} with multi_label={multi_label}. "
            f"{change}, or import other labels."
        )
    if store.label_names is not None and len(store.label_names) != num_classes:
        num = len(store.label_names)
        raise DataError(
            f"{where} has {num} class names; expected {num_classes}, as many as the model has "
            f"classes. Pass --model.num-classes {num}, or import with --classes FILE, which lists "
            f"all {num_classes}."
        )
    missing = len(rows) - int(np.count_nonzero(of_rows(store.labelled, rows)))
    # With --unknown-classes unlabelled at the import such a record is drawn, and its contribution
    # is exactly zero.
    if missing > 0 and (missing == len(rows) or not store.meta.get("may_be_unlabelled")):
        one, but = ("a list", " Write [] for none of the classes.") if multi_label else ("one", "")
        raise DataError(
            f"{where}: {OPERATOR_ONLY}{missing} of {len(rows)} records have no label; expected "
            f"{one} each. Import with --label-from FIELD.{but}"
        )
    place_M, class_M = store.classes(np.asarray(rows))
    if (outside := len(np.unique(place_M[class_M >= num_classes]))) > 0:
        raise DataError(
            f"{where}: {OPERATOR_ONLY}label={int(class_M.max())} in {outside} records is outside "
            f"the range; expected 0 to {num_classes - 1}: numbers count from 0. Pass "
            f"--model.num-classes {int(class_M.max()) + 1}; or, if yours count from 1 or skip "
            "numbers, import with --classes FILE, which lists them."
        )
    count_K = np.bincount(class_M, minlength=num_classes)
    if multi_label and len(rows) and ((count_K == 0) | (count_K == len(rows))).all():
        raise DataError(
            f"{where}: {OPERATOR_ONLY}every record has the same labels; expected some that "
            "differ. Import other labels."
        )
    if not multi_label and len(rows) and count_K.max() == len(rows):
        raise DataError(
            f"{where}: {OPERATOR_ONLY}one class only, label={int(class_M[0])}; expected two or "
            "more. Add images of another class."
        )

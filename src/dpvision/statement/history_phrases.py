"""The statement's sentences about history: where weights come from, how a run was chosen and ended,
what else was run on its store, and the guarantees of earlier runs that its weights keep.

``others`` are the statement's ``other_stores``: the private stores behind the weights, with the
figures of all runs on each.
"""

from typing import Any

from dpvision.config.unit import Stated
from dpvision.data.store import CURATION, SHARED_KEPT
from dpvision.privacy.ledger import StoreAccount
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import count, down, factor, one_in, up, up_delta
from dpvision.statement.phrases import of_every_guarantee, simulated, tier
from dpvision.statement.schema import Stop, Tuning

HEADS = (
    "Scores in this statement were measured on public images with heads trained on public "
    "images: they cost no privacy. A head trained on private images needs a guarantee of its "
    "own, which this statement does not give."
)
OF_A_HEAD = (
    "This run releases a head: it was trained on the private images under this guarantee, and "
    "scores measured with it on public images cost no further privacy. Its encoder was not "
    "changed."
)
NO_AUDITS = (
    "No attack was run against this model. The bounds on attacks in this statement are proven "
    "and do not rely on one."
)
AUDITED = (
    "The mechanism of this plan was audited on synthetic records ({kind}), with {scores:,} scores: "
    "it {verdict}. Noise of {noise:.3f} and a shift of {shift:.3f} were measured, 1 being the "
    "plan's. With Gaussian noise of whatever size epsilon is at least {low}, at confidence "
    "{confidence:g}. No attack was run against this model. The bounds on attacks in this statement "
    "are proven and do not rely on the audit."
)
ATTACKED = (
    "A run of this plan on synthetic records, with {canaries:,} canaries included by fair coins, "
    "was attacked through its weights{how}: it {verdict}. Of {guesses:,} guesses {right:,} were "
    "right: epsilon is at least {low}, whatever the mechanism, and at least {low_of_plan} with "
    "Gaussian noise of whatever size, at confidence {confidence:g}. So many canaries cannot show "
    "more than {at_most} whatever the mechanism, and a weak attack shows less. The attack's area "
    "under the ROC curve was {auc:.3f}, where the plan allows {limit:.3f}. This model itself was "
    "not attacked."
)
AUDITED_BEFORE = "Earlier audits of this kind: {audits:,}, of which {failed:,} FAILED."
PROCEDURAL = "Apache-2.0 (procedural)"
"""Licence of textures and scenes rendered by dpvision."""
SHARED_IMAGES = (
    "Who has an image that was found under two persons: the import kept each such image for the "
    "first of them, as the operator asked. What remains of the second person depends on the "
    "first."
)
COMPARED = (
    "Images of the source of a private store that was curated by comparing images with each "
    "other ({}): the guarantee is for the curated store. Whether an image is in it depends on "
    "others: one image of the source {}."
)
TWINS = (
    "Whether a public image was also among the private ones: a public store in the lineage was "
    "cleared of such images, and the images missing from it reveal them. For an image without a "
    "public twin the guarantee holds in full, because it does not change that store."
)
APART = (
    "That no image of a public store in the lineage, and none that looks like one, is among the "
    "private images: otherwise this run would have been refused, so that it tells. For an image "
    "that resembles none of the public ones the guarantee holds in full."
)


def entry_text(entry: dict[str, Any], *, own: bool) -> str:
    """Return one or two sentences about an entry of the statement's lineage.

    Args:
        own: whether it is the last entry, the run's own.
    """
    store_id, guarantee = entry["store_id"], entry["guarantee"]
    kind, _, name = store_id.partition(":")
    who = "This run" if own else "An earlier run"
    licence = (
        f" Licence: {entry['licence'] or 'not recorded'}."
        if entry["visibility"] == "public"
        else ""
    )
    if guarantee is not None:
        plan = DPPlan.from_dict(guarantee["plan"])
        # Of the plan: an entry of an older version has the epsilon of the executed steps.
        said = plan.unit.stated(plan.epsilon or 0.0, plan.unit_epsilon)
        epsilon = said.epsilon if plan.stated_steps(guarantee["steps"]) else 0.0
        whom = (
            " for a person"
            if said.of_person
            else " for a single image"
            if plan.unit.is_person
            else ""
        )
        steps = (
            f"{guarantee['steps']:,} of {plan.steps:,} planned"
            if guarantee["steps"] < plan.steps
            else f"{plan.steps:,}"
        )
        return (
            f"{who}, on {entry['visibility']} store {store_id[:12]}: epsilon "
            f"{up(epsilon, 2)}{whom} at delta {up_delta(guarantee['delta'])}, {steps} "
            f"steps.{licence}"
        )
    if entry["visibility"] == "public" and entry["licence"] == PROCEDURAL and not entry["declared"]:
        made = (
            f"{name}, computed by dpvision from textures"
            if kind == "weights"
            else f"store {store_id[:12]}, rendered by dpvision"
        )
        return f"Procedural images: {made}; no private data, so no guarantee is needed.{licence}"
    if kind == "weights":
        return f"Published weights {name}.{licence}"
    if kind == "images":
        return f"{who}, on {entry['visibility']} images {name}, without a guarantee.{licence}"
    if entry["run_id"] is None:
        return f"Mean and spread of features of public store {store_id[:12]}.{licence}"
    if entry["visibility"] == "public":
        return f"{who}, on public store {store_id[:12]}, whose images need no protection.{licence}"
    return f"{who}, on private store {store_id[:12]}, without a guarantee."


def curated(lineage: list[dict[str, Any]]) -> list[str]:
    """Return what the guarantee does not cover because images were removed from a store, or given
    to one of two persons, by others.
    """
    return [
        *([SHARED_IMAGES] if any(entry.get(SHARED_KEPT) for entry in lineage) else []),
        *([TWINS] if any(e["deduplicated"] and e["run_id"] for e in lineage) else []),
        *([APART] if any(e["deduplicated"] and not e["run_id"] for e in lineage) else []),
        *dict.fromkeys(
            COMPARED.format(_steps(found), _changes(found["stability"]))
            for entry in lineage
            if (found := entry.get(CURATION)) is not None
            and entry["visibility"] == "private"
            and found["stability"] != 1
        ),
    ]


def _steps(record: dict[str, Any]) -> str:
    return ", ".join(step["name"] for step in record["steps"])


def _changes(stability: int | None) -> str:
    if stability is None:
        return "can change any number of images of the store"
    return (
        f"changes at most {stability} images of the store, so for it the guarantee of a group of "
        f"{stability} holds"
    )


def curation(record: dict[str, Any], visibility: str) -> dict[str, Any]:
    """Return by which steps a store was made, with a sentence.

    Args:
        record: ``curation`` of store.json.
    """
    text = f"The store was curated by declared steps: {_steps(record)}."
    if visibility == "private":
        text += (
            " Each decides on an image alone, so the guarantee holds for images of the source too "
            "(files stored as the same bytes are one image)."
            if record["stability"] == 1
            else f" They compare images: one of the source {_changes(record['stability'])}."
        )
    return record | {"text": text}


def declared(by: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return who declared weights without a lineage public, or None if nothing had to be
    declared.
    """
    if by is None:
        return None
    who = "the operator" if by["by"] == "operator" else "their name in a library"
    return {
        **by,
        "text": f"Declared to be public by {who}: {by['name']}, from {by['source']}. This was not "
        "verified.",
    }


def deduplicated(entry: dict[str, Any]) -> dict[str, Any] | None:
    """Return which private twins were left out of a public store (``data overlap --out``), or were
    not to be found in one that no run trained on, or None if none were searched for.
    """
    if (record := entry.get("deduplicated")) is None:
        return None
    stores = ", ".join(store_id[:8] for store_id in record["against"])
    return {
        "against": record["against"],
        "methods": record["methods"],
        "text": (
            f"Public images that are also in store {stores} were left out before training on "
            f"this store ({'; '.join(record['methods'])}). Their number is not given because it "
            "depends on the private images."
            if entry["run_id"]
            else f"Compared with store {stores} before the run ({'; '.join(record['methods'])}): "
            "one image in both would have refused it, and none was left out."
        ),
    }


def audits(runs: list[dict[str, Any]]) -> str:
    """Return what is known of audits: of the mechanism, or that there was none."""
    said = []
    for run in runs:
        verdict = "passed" if run["passed"] else "FAILED"
        words = {"verdict": verdict, "low": down(run["epsilon_low"])}
        if run["kind"] == "black-box":
            words["low_of_plan"] = down(run["epsilon_low_of_plan"])
            words["at_most"] = up(run["epsilon_low_at_most"])
            words["how"] = f", with {n} shadow models" if (n := run.get("shadows", 0)) else ""
            auc = {"auc": run["attack"]["auc"], "limit": run["limits"]["auc"]}
            said.append(ATTACKED.format(**run, **words, **auc))
        else:
            said.append(AUDITED.format(**run, **words))
        if "earlier" in run:
            said.append(AUDITED_BEFORE.format(**run["earlier"]))
    return " ".join(said) or NO_AUDITS


def ledger_source(from_store: bool) -> str:
    """Return which ledger the steps were counted in."""
    if from_store:
        return (
            "Counted in the store's ledger, its hash chain verified; the run folder's copy "
            "agrees with it."
        )
    return (
        "Counted in the run folder's copy of the ledger, its hash chain verified; the store's "
        "ledger was not available."
    )


OTHER_RUNS_UNKNOWN = (
    "Unknown: the store was not available when this statement was written. If other runs used "
    "the same images, their cost adds to this; `dpvision ledger STORE` computes the total."
)
COPIES_UNKNOWN = (
    "Not included: a second import of the same images, or a copy of the store used elsewhere, "
    "has separate ledgers, and the cost charged there adds to this."
)
TUNING: dict[Tuning, str] = {
    "none": "Declared by the operator: the settings were fixed before the first run on these "
    "images, and the checkpoint is the last one.",
    "public": (
        "Declared by the operator: settings and checkpoint were chosen by public scores alone. "
        "A choice among several runs on the same images is covered by the total of those runs, "
        "not by the epsilon of the one that was chosen."
    ),
    "charged": (
        "Declared by the operator: settings and checkpoint were chosen among runs on these "
        "images, by public scores of their weights. Each of those runs is charged to the "
        "store's ledgers. The choice costs their total (other_runs), not the epsilon of this "
        "run."
    ),
    "not_covered": (
        "Not covered: it is not recorded how the settings and the checkpoint were chosen. If "
        "they were chosen by results on these images, that choice has a privacy cost that "
        "epsilon does not include."
    ),
}
CHOICE = (
    "The choice of this run among several on the same images: it costs the total of those runs "
    "(history.other_runs: epsilon_filter, and for a person unit_epsilon_total), which is larger "
    "than the epsilon of this run. {}"
)
CHOSEN_LATER = (
    "That settings of one run behind the weights followed results of another on the same "
    "images, which was not declared otherwise: their total is a guarantee for settings fixed "
    "beforehand. {}"
)
NO_CAP = (
    "A total over runs chosen from earlier results is a guarantee only against a cap set before "
    "the first run, and there is none."
)
CAP_UNKNOWN = NO_CAP.replace("and there is none", "which is not known here")
STOP = (
    "That the run ended at this step, if confidential figures decided it: losses, gradient "
    "norms, scores of private images. Ends decided by released weights, public scores or "
    "outside events are covered by epsilon, which is that of all planned steps."
)
EARLIER_STOP = (
    "That an earlier run behind the weights ended before its plan, if confidential figures "
    "decided it: losses, gradient norms, scores of private images."
)
STOPPED = {
    "independent": (
        "{steps:,} of {planned:,} planned steps were executed. Declared by the operator: "
        "nothing computed from the images had an influence on where the run ended. Every figure "
        "is nevertheless for all planned steps; those of the executed steps stand beside it."
    ),
    "not_declared": (
        "{steps:,} of {planned:,} planned steps were executed. Every figure is for all planned "
        "steps: the released weights, or their scores, may have decided where the run ended, "
        "which the epsilon of the executed steps does not cover."
    ),
}
"""Text of ``history.stop``, by the operator's declaration."""
SELECTION = (
    "Charged: one setting of a public list was chosen by its score on these images, in a "
    "private selection. A secret random number of runs was made, each with a setting drawn from "
    "the list and with a noisy score, and the best of them is released; epsilon covers all of "
    "them and the choice. For all other settings: "
)
"""Precedes the operator's declaration about the rest."""


def stop(plan: DPPlan, steps: int, declared: Stop) -> dict[str, Any] | None:
    """Return how a run ended that was charged some of its planned steps; None for one that executed
    all of them, or none.
    """
    if not 0 < steps < plan.steps:
        return None
    return {"declared": declared, "text": STOPPED[declared].format(steps=steps, planned=plan.steps)}


def not_covered_of(
    lineage: list[dict[str, Any]],
    tuning: Tuning,
    guarantee: dict[str, Any],
    ended_early: dict[str, Any] | None,
    other_runs: dict[str, Any],
    others: "Others",
) -> list[str]:
    """Return what the guarantee does not cover because of a statement's lineage, and of how the run
    was chosen and ended.

    Args:
        ended_early: from ``stop``.
        other_runs: ``history.other_runs`` of the statement.
    """
    cap = other_runs.get("cap")
    capped = NO_CAP
    if cap is not None and cap["covers_choice"]:
        capped = (
            f"The owner's cap, set before the first run, covers it: epsilon {up(cap['epsilon'])} "
            f"at delta {up_delta(cap['delta'])}."
        )
    elif not other_runs["known"]:
        capped = CAP_UNKNOWN
    adaptive = guarantee["composition"]["methods"]["epsilon"] in ("filter", "basic")
    return [
        *([STOP] if ended_early is not None and ended_early["declared"] != "independent" else []),
        *in_several_stores(guarantee, others),
        *of_earlier_runs(lineage, adaptive=adaptive, capped=capped),
        *([CHOICE.format(capped)] if tuning == "charged" else []),
    ]


def in_several_stores(guarantee: dict[str, Any], others: "Others") -> list[str]:
    """Return what the epsilon of one store does not cover if the weights come from several: basic
    composition bounds it for who is in all of them.
    """
    if not others:
        return []
    said = [Stated.of("record", of["epsilon"], of["unit_epsilon"]) for of in (guarantee, *others)]
    whom = "A person with images" if all(one.of_person for one in said) else "An image that is"
    names = " and ".join(of["store_id"][:12] for of in others)
    return [
        f"{whom} in this store and in private store {names}, which the weights come from too: for "
        f"these, epsilon is the sum over the stores, {up(sum(one.epsilon for one in said), 2)} at "
        f"delta {up_delta(sum(of['delta'] for of in (guarantee, *others)))}."
    ]


def of_earlier_runs(
    lineage: list[dict[str, Any]], *, adaptive: bool, capped: str = CAP_UNKNOWN
) -> list[str]:
    """Return what a guarantee does not cover because of the statement's lineage, this run last.

    Args:
        adaptive: whether the settings of one run may have followed another's results.
        capped: sentence about the owner's cap.
    """
    named = [entry["declared"]["name"] for entry in lineage if entry["declared"]]
    ended = any(
        0 < g["steps"] < g["plan"]["steps"]
        for entry in lineage[:-1]
        if (g := entry["guarantee"]) is not None
    )
    return [
        *(
            [
                f"Weights that were declared to be public ({', '.join(named)}): their training "
                "data was not verified."
            ]
            if named
            else []
        ),
        *([EARLIER_STOP] if ended else []),
        *([CHOSEN_LATER.format(capped)] if adaptive else []),
        *curated(lineage),
    ]


def tuning(plan: DPPlan, declared: Tuning) -> str:
    """Return how settings and checkpoint were chosen."""
    return (SELECTION if plan.selection is not None else "") + TUNING[declared]


def other_runs(account: StoreAccount, run_id: str) -> str:
    """Return the total cost of all runs on the store."""
    others = sum(run.run_id != run_id for run in account.runs)
    if account.unprotected:
        return (
            f"{count(len(account.unprotected), 'run')} without a guarantee used the same images. "
            "Their results are confidential; if they were released, or used to choose settings, "
            "no total would hold."
        )
    unknown = COPIES_UNKNOWN if not account.moves else f"{COPIES_UNKNOWN} {_moved(account.moves)}"
    if not others:
        return f"None is known: this is the only run in the store's ledgers. {unknown}"
    of_unit = account.unit_epsilon
    person = (
        "" if of_unit is None else f"epsilon {up(of_unit, 2)} for a person with all their images"
    )
    image = f"epsilon {up(account.epsilon or 0.0, 2)}"
    chosen = (
        "For settings chosen after seeing earlier runs, statement.json has epsilon_filter; it is "
        "no guarantee, for lack of a cap set before the first run."
    )
    if account.cap is not None and account.cap_covers_choice:
        chosen = (
            "The owner's cap, set before the first run, is a guarantee also for settings chosen "
            "after seeing earlier runs."
        )
    total = (
        f"{person},"
        if account.draws_people
        else image
        if of_unit is None
        else f"{person}, and {image} for an image,"
    )
    return (
        f"{count(others, 'other run')} charged to the same store, whose parts (dpvision data "
        "split) share one account; a release of scores counts as a run. With this run they cost "
        f"{total} at delta {up_delta(account.delta or 0.0)} if their settings were fixed "
        f"beforehand; every run counts with all its planned steps. {chosen} {unknown}"
    )


def _moved(moves: int) -> str:
    return (
        f"The operator declared {count(moves, 'time')} that the store was moved and that no copy "
        "of it is in use."
    )


Others = list[dict[str, Any]]

OWN_IMAGES = "The images of this run: they are public, and none of them is protected."
IN_BOTH = (
    "An image of a private store that is also among this run's public images, or among those of "
    "another run behind the weights."
)
SECOND_LOOK = (
    "Choices made by looking at the private images once more, such as scores on them: only what "
    "the earlier runs released is covered."
)
OTHER_LEDGERS = (
    "Other runs on those private stores: the figures are of the runs behind these weights, as "
    "recorded in their lineage. `dpvision ledger STORE` computes the total of a store."
)


def protection(figures: dict[str, Any], drawn: str = "record") -> str:
    """Return epsilon and delta of figures of one store, and whom they are for.

    Args:
        drawn: by the plan behind the figures; of a total, in which unit_epsilon alone says it,
            "record".
    """
    said = Stated.of(drawn, figures["epsilon"], figures["unit_epsilon"])
    return (
        f"with epsilon {up(said.epsilon, 2)} and delta {up_delta(figures['delta'])} for each "
        f"{said.whom}"
    )


def kept(others: Others) -> str:
    """Return the guarantees of all stores as text, with the stores."""
    said = (
        protection(of)
        + ("," if of["unit_epsilon"] is not None else "")
        + f" of private store {of['store_id'][:12]}"
        for of in others
    )
    return "; ".join(said)


def kept_headline(others: Others) -> str:
    """Return the headline of a run without a guarantee whose weights have others' guarantees."""
    return (
        f"Differential privacy {kept(others)}: kept from earlier training. The images of this "
        "run itself are public and have no guarantee."
    )


def of_stores(others: Others) -> list[str]:
    """Return a paragraph on the guarantee of each store behind the weights."""
    said = []
    for store in others:
        said_for = Stated.of("record", store["epsilon"], store["unit_epsilon"])
        whom = "person, with all their images," if said_for.of_person else "image"
        said.append(
            f"Remove any one {whom} from private store {store['store_id'][:12]}. Any result of "
            "all this training could have occurred without it as well: its probability changes "
            f"by a factor of at most e^epsilon = {factor(said_for.epsilon)}, up to delta, "
            f"{one_in(store['delta'])}. {tier(said_for.epsilon)}"
        )
    return said


def kept_in_words(plan: DPPlan, others: Others) -> list[str]:
    """Return paragraphs that explain that headline."""
    return [
        "The weights come from earlier training with differential privacy. This run trained "
        "them further on images that were imported as public or are synthetic, without reading "
        "a private store. That is post-processing, which weakens no guarantee: what held for "
        "the images of the private stores holds for these weights too.",
        *of_stores(others),
        "Nothing was done to hide any image of this run: the model may reproduce "
        f"them.{simulated(plan)} The figures of its mechanism describe what was executed and are "
        "no statement about privacy.",
    ]


def kept_released(files: str) -> str:
    """Return what may be released, after a sentence that lists the files."""
    return (
        f"{files} Any of them may reveal the images of this run, which are public. They depend "
        "on the images of the private stores behind the weights only through what those runs "
        "released."
    )


def kept_not_covered(lineage: list[dict[str, Any]], others: Others) -> list[str]:
    """Return what the kept guarantees do not cover.

    Args:
        lineage: the statement's, this run last.
    """
    adaptive = any(
        store["composition"]["methods"]["epsilon"] in ("filter", "basic") for store in others
    )
    return [
        OWN_IMAGES,
        IN_BOTH,
        SECOND_LOOK,
        OTHER_LEDGERS,
        *of_every_guarantee(persons=all(store["unit_epsilon"] is not None for store in others)),
        *of_earlier_runs(lineage, adaptive=adaptive),
    ]

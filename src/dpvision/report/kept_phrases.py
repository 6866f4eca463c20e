"""Sentences about guarantees of earlier runs that the weights of a run without one keep: training
on public images is post-processing.

``others`` are the statement's ``other_stores``: the private stores behind the weights, with the
figures of all runs on each.
"""

from typing import Any

from dpvision.config.unit import Stated
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import one_in, up, up_delta
from dpvision.report.choice_phrases import of_earlier_runs
from dpvision.report.numbers import factor
from dpvision.report.phrases import of_every_guarantee, simulated, tier

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


def protection(figures: dict[str, Any], sampling_unit: str = "record") -> str:
    """Return epsilon and delta of figures of one store, and whom they are for.

    Args:
        sampling_unit: of the plan behind the figures; of a total, in which unit_epsilon alone says
            it, "record".
    """
    said = Stated.of(sampling_unit, figures["epsilon"], figures["unit_epsilon"])
    whom = "person, with all their images" if said.of_person else "single image"
    return (
        f"with epsilon {up(said.epsilon, 2)} and delta {up_delta(figures['delta'])} for each {whom}"
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


def headline(others: Others) -> str:
    """Return the headline of a run without a guarantee whose weights have others' guarantees."""
    return (
        f"Differential privacy {kept(others)}: kept from earlier training. The images of this "
        "run itself are public and have no guarantee."
    )


def in_words(plan: DPPlan, others: Others) -> list[str]:
    """Return paragraphs that explain that headline."""
    said = []
    for store in others:
        said_for = Stated.of("record", store["epsilon"], store["unit_epsilon"])
        epsilon, whom = (
            said_for.epsilon,
            "person, with all their images," if said_for.of_person else "image",
        )
        said.append(
            f"Remove any one {whom} from private store {store['store_id'][:12]}. Any result of "
            "all this training could have occurred without it as well: its probability changes "
            f"by a factor of at most e^epsilon = {factor(epsilon)}, up to delta, "
            f"{one_in(store['delta'])}. {tier(epsilon)}"
        )
    return [
        "The weights come from earlier training with differential privacy. This run trained "
        "them further on images that were imported as public or are synthetic, without reading "
        "a private store. That is post-processing, which weakens no guarantee: what held for "
        "the images of the private stores holds for these weights too.",
        *said,
        "Nothing was done to hide any image of this run: the model may reproduce "
        f"them.{simulated(plan)} The figures of its mechanism describe what was executed and are "
        "no statement about privacy.",
    ]


def released(files: str) -> str:
    """Return what may be released, after a sentence that lists the files."""
    return (
        f"{files} Any of them may reveal the images of this run, which are public. They depend "
        "on the images of the private stores behind the weights only through what those runs "
        "released."
    )


def not_covered(lineage: list[dict[str, Any]], others: Others) -> list[str]:
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

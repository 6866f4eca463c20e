"""The statement's sentences about scope and mechanism: facts about every run, and facts that
follow from a plan.

A sentence that differs between records and people is asked of the plan's unit: a table by what is
drawn, or the words of whom an epsilon is for. ``head`` is whether the run is of a private head on
frozen features.
"""

from typing import Any, NamedTuple

from dpvision.dp.rounding import RESERVE, added_bound
from dpvision.privacy.composition import Method
from dpvision.privacy.plan import DPPlan, default_delta
from dpvision.privacy.printed import count, factor, one_in, percent_up, up, up_delta
from dpvision.privacy.refusal import MAX_DELTA

TRUST_MODEL = (
    "Whoever runs the training is trusted with the images. The guarantee holds against "
    "everybody who receives what is released, even if they see the weights after every single "
    "step. It assumes that they learn neither the random keys of the run nor which images a "
    "step has drawn."
)
ADJACENCY = {
    "record": (
        "Add or remove one: two sets of images are neighbours if one has one image more than the "
        "other and they are otherwise equal."
    ),
    "person": (
        "Add or remove one person: two sets of images are neighbours if one has one person more "
        "than the other, with all their images, however many, and they are otherwise equal."
    ),
}
"""Which sets of images are neighbours, by what is drawn; ``adjacency`` of a guarantee."""
RECORD = (
    "One record: an image with all its captions and labels. Files with identical image bytes "
    "are one record."
)
DATASET_SIZE = {
    "record": (
        "The number of images is a declared, public constant of the plan. The sampling rate and "
        "the divisor follow from it, never from the number of images in the store, which may "
        "differ by up to 1% (in full batches: be up to 1% smaller)."
    ),
    "person": (
        "The numbers of people and of images are declared, public constants of the plan. The "
        "sampling rate and the divisor follow from the declared number of people, never from the "
        "numbers in the store, which may differ by up to 1% (in full batches there may be up to 1% "
        "fewer people). How many images a person has is secret."
    ),
}
"""Where the declared numbers go, by what is drawn."""
BAD_RECORDS = {
    "record": (
        "An image that cannot be decoded, or whose gradient is not finite, contributes exactly "
        "zero to its step. It is not replaced by another, and no step is skipped or stopped "
        "because of it."
    ),
    "person": (
        "An image that cannot be decoded, or that has no caption or label where one is needed, "
        "counts as one that the person does not have. A person without any other image, or whose "
        "gradient is not finite, contributes exactly zero to the step. No one else is drawn in "
        "that person's place, and no step is skipped or stopped because of it."
    ),
}
"""What an image that cannot be used contributes, by what is drawn."""
SIDE_CHANNELS = [
    "Time: the duration of a step depends on how many images it drew. Times are not released, but "
    "wasted steps show if one was abandoned at a stop, because it did not end in time.",
    "Floating point: noise is added in finite precision, whose rounding an attacker could in "
    "theory exploit.",
    "The machine: memory, disks, backups, and its terminal.",
]

SELECTION_TIME = (
    "The number of runs of the selection: epsilon holds only while it stays secret. The "
    "duration of the command, the load of the machine and the times of its files reveal "
    "something about it."
)

FILES = (
    "Checkpoints (weights, moving average, optimizer state), settings, calibration, ledger, "
    "public and released scores, this statement, report.html."
)
"""What a run of a network may release."""
HEAD_FILES = (
    "The head (weight and bias), settings, calibration, ledger, public and released scores, "
    "this statement, report.html."
)
"""What a head's run may release."""
NO_PROFILE = "added epsilons give one pair (epsilon, delta), no profile"
COMPOSITION: dict[Method, str] = {
    "one run": "The weights come from one run on this store.",
    "pld": "Their privacy loss distributions are composed: the settings of all of them were "
    "declared to be fixed beforehand.",
    "gaussian": "All of them are Gaussian mechanisms, composed in closed form: their settings were "
    "declared to be fixed beforehand.",
    "renyi": "Their Renyi divergences are added: the settings of all of them were declared to be "
    "fixed beforehand.",
    "filter": (
        "Their total is given by a Renyi filter (Feldman and Zrnic, arXiv 2008.11193), which "
        "allows for settings chosen after seeing earlier results; that is proven against a cap "
        "set before the first run."
    ),
    "basic": "One of them has no Renyi accounting: their epsilons, each at an equal share of "
    "delta, are added.",
}


def is_head(config: dict[str, Any]) -> bool:
    """Return whether a run's config is of a private head."""
    return config["model"].get("kind") == "head"


class _Words(NamedTuple):
    """What the paragraphs say of an image, or of a person."""

    it: str
    others: str
    took_part: str
    its_use: str
    unused: str
    used: str
    several: str
    one: str


_IMAGE = _Words(
    it="it",
    others="all other images",
    took_part="image was used",
    its_use="its use",
    unused="images that were not used",
    used="that were used",
    several="images",
    one="image",
)
_PERSON = _Words(
    it="them",
    others="the images of all other people",
    took_part="person took part",
    its_use="it",
    unused="people who did not take part",
    used="who did",
    several="people",
    one="person",
)


def in_words(plan: DPPlan, guarantee: dict[str, Any] | None) -> list[str]:
    """Return paragraphs that explain the headline to a reader who does not know epsilon."""
    if guarantee is None:
        return [
            "Its images were imported as public or are synthetic, and nothing was done to hide "
            f"any of them: the model may reproduce them.{simulated(plan)}",
            "The figures below describe what was executed. None of them is a statement about "
            "privacy.",
        ]
    unit, delta = plan.unit, guarantee["delta"]
    said = unit.stated(guarantee["epsilon"], guarantee["unit_epsilon"])
    seen = (
        "the model after every step"
        if plan.selection is None
        else "the model that was chosen, with its score,"
    )
    words, attack, more = _IMAGE, guarantee["attack"], ""
    all_of_them = f"{unit.num_records:,} images, with everything that belongs to it"
    if said.of_person:
        words, attack = _PERSON, guarantee["unit_attack"]
        images = unit.images + (" in each step" if unit.draws_people else "")
        all_of_them = (
            f"{unit.population:,} people, with all their images, of which {images} took part"
        )
        if said.of_image is not None:
            more = (
                f" For a single image of a person with at most {unit.max_records}, "
                f"epsilon is {up(said.of_image, 2)}."
            )
    return [
        f"Remove any one of the {all_of_them}. Any result of this training could have occurred "
        f"without {words.it} as well: its probability changes by a factor of at most e^epsilon = "
        f"{factor(said.epsilon)}, up to delta, {one_in(delta)}.{more}",
        f"For scale, take the strongest attacker: one who knows {words.others}, sees {seen} and "
        f"only has to decide whether one given {words.took_part}. If a fair coin had decided "
        f"{words.its_use}, no method would be right more than "
        f"{percent_up(attack['coin_accuracy'])} of the time; guessing is right 50% of the time.",
        f"If the attacker may accuse only 1 in 100 of the {words.unused}, at most "
        f"{percent_up(attack['tpr_at_fpr_0.01'])} of those {words.used} can be found; if only 1 "
        f"in 1,000, at most {percent_up(attack['tpr_at_fpr_0.001'])}. Blind guessing would find "
        "1% and 0.1%.",
        "These are proven worst-case limits, not measurements; real attackers know less. "
        f"{tier(said.epsilon)} What many {words.several} have in common is learned on purpose "
        f"and is not protected: the guarantee is for each single {words.one}.",
    ]


def simulated(plan: DPPlan) -> str:
    """Return a sentence about a simulation, or nothing."""
    return (
        " It simulates a private run to find settings for it."
        if plan.guarantee == "simulated"
        else ""
    )


def tier(epsilon: float) -> str:
    """Return how an epsilon is commonly judged."""
    verdict = (
        "strong"
        if epsilon <= 1
        else "reasonable, short of strong (which is up to 1)"
        if epsilon <= 10
        else "weak or no protection by itself"
    )
    return (
        "By a common reading (Ponomareva et al. 2023, arXiv 2303.00654) an epsilon of "
        f"{up(epsilon, 2)} is {verdict}."
    )


def released(plan: DPPlan, *, head: bool) -> str:
    """Return what may be released."""
    files = HEAD_FILES if head else FILES
    if plan.guarantee != "dp":
        return f"{files} Any of them may reveal the content of the images."
    features = " Features of the images stay with the store." if head else ""
    return f"{files} They depend on the private images only through noisy sums.{features}"


def not_covered(plan: DPPlan, *, persons: bool = True) -> list[str]:
    """Return what the guarantee does not cover.

    Args:
        persons: whether other stores behind the weights state it for persons.
    """
    if plan.guarantee != "dp":
        return ["Everything: no image of this run is protected."]
    return [CONFIDENTIAL, *of_every_guarantee(persons=persons and plan.unit.is_person)]


CONFIDENTIAL = (
    "Everything under confidential/: losses, gradient norms, batch sizes, times, images. It "
    "must not be released."
)


def of_every_guarantee(*, persons: bool) -> list[str]:
    """Return what no guarantee covers, and if it is not one of ``persons``, several images of
    one.
    """
    return [
        "Facts about the whole population that the model learns from many images together.",
        "How the store was assembled before the run: removing private images because of other "
        "private images (such as near-duplicates) is not covered; filtering each image "
        "independently, or against a fixed public set, is free. The guarantee is for the store "
        "as it was.",
        "The same image, or images of the same person, in other data sets or under other ledgers.",
        *(
            []
            if persons
            else [
                "Several different images of one person: the import did not record the person "
                "of each image."
            ]
        ),
    ]


def adjacency(plan: DPPlan) -> str:
    """Return which sets of images are neighbours in the guarantee of the headline."""
    if not plan.unit.is_person or plan.unit.draws_people:
        return ADJACENCY[plan.unit.drawn]
    return ADJACENCY["person"].replace("however many", f"at most {plan.unit.max_records}")


def unit(plan: DPPlan, *, head: bool) -> str:
    """Return the unit of the guarantee."""
    of, k = plan.unit, plan.unit.max_records
    if not of.is_person:
        return RECORD
    people = (
        f"One person, with all their images: {of.num_people:,} people are declared, a public "
        f"number. {RECORD}"
    )
    if not of.draws_people:
        return (
            f"{people} At most {k} of a person take part. The headline has the epsilon of a "
            "person, unit_epsilon. The figure called epsilon is for one image of a person with "
            "no more images than that: with more, removing one lets another take part."
        )
    if not head:
        which = (
            f"At most {k} of a person's images take part in a step, chosen from the seed, the "
            "step and those images' ids."
        )
    else:
        some = (
            "One image of each person takes part"
            if k == 1
            else f"At most {k} images of a person take part, with one label"
        )
        which = (
            f"{some}, in every release the same, chosen from the seed and that person's ids and "
            "labels."
        )
    return (
        f"{people} People are drawn. {which} Every epsilon is for a person. There is none for a "
        "single image of a person: without it, the person still takes part."
    )


def delta_rule(plan: DPPlan, num_parents: int) -> str:
    """Return how delta was chosen."""
    default = (
        "1 / (2 N)" if plan.delta < MAX_DELTA else f"{up_delta(MAX_DELTA)}, the largest default"
    )
    rule = default if plan.delta == default_delta(plan.unit.population) else "set explicitly"
    joined = (
        f" With {count(num_parents, 'earlier run')} in the lineage, every figure holds at the "
        "smallest delta."
        if num_parents
        else ""
    )
    return (
        f"{rule}, N being the declared number of {plan.unit.protected}; training is refused when "
        f"N x delta exceeds 1.5.{joined}"
    )


def composition(num_runs: int, method: Method) -> str:
    """Return how the epsilons of the runs behind the weights were combined."""
    return (
        f"The weights come from {count(num_runs, 'run')} on this store. {COMPOSITION[method]}"
        if num_runs > 1
        else COMPOSITION[method]
    )


def trust_model(plan: DPPlan) -> str:
    """Return the trust model: who may see what."""
    if plan.selection is None:
        return TRUST_MODEL
    return TRUST_MODEL.replace(
        "the weights after every single step",
        "all steps of the run that was chosen, and nothing of the others",
    )


def selection(plan: DPPlan) -> dict[str, Any] | None:
    """Return the private selection that the run's one step is, or None for ordinary steps."""
    asked = plan.selection
    if asked is None:
        return None
    law = (
        "Poisson"
        if asked.shape is None
        else f"truncated negative binomial of shape {asked.shape:g}"
    )
    return {
        "mean_runs": asked.mean_runs,
        "shape": asked.shape,
        "steps_per_run": asked.steps,
        "score_noise_multiplier": asked.score_noise_ratio * plan.noise.multiplier,
        "text": (
            f"The one step is a selection: a secret number of runs ({law}, mean "
            f"{asked.mean_runs:g}), of {asked.steps:,} steps each, with the noise, clipping and "
            "sampling given here, and a noisy count of correctly classified records, to which "
            "each adds at most 1."
        ),
    }


def side_channels(plan: DPPlan) -> list[str]:
    """Return the side channels that are out of scope."""
    return SIDE_CHANNELS if plan.selection is None else [SELECTION_TIME, *SIDE_CHANNELS]


def accountant_method(plan: DPPlan) -> str:
    """Return how epsilon was computed."""
    if plan.selection is not None:
        theorem = (
            "6 (Poisson)" if plan.selection.shape is None else "2 (truncated negative binomial)"
        )
        return (
            f"Renyi: of one run, then theorem {theorem} of Papernot and Steinke (arXiv "
            "2110.03620). No tighter one exists for selections."
        )
    if not plan.sampler.amplifies:
        return (
            "Exact: all steps together are one Gaussian mechanism (Balle and Wang, arXiv "
            "1805.06530)."
        )
    return (
        "Privacy loss distribution, pessimistic (Doroshenko et al., arXiv 2207.04380): an upper "
        "bound on the true epsilon. epsilon_rdp is the looser Renyi bound with the conversion "
        "of Balle et al. (arXiv 1905.09982), for comparison with papers."
    )


def sampling_assumed(plan: DPPlan) -> str:
    """Return the sampling scheme that the accountant assumes."""
    q, one = f"probability {plan.sample_rate:.6g}", plan.unit.drawn
    return {
        "poisson": f"Poisson: in each step each {one} is sampled independently, with {q}.",
        "truncated_poisson": f"Truncated Poisson: each {one} sampled independently, with {q}; a "
        f"random {plan.sampler.max_batch_size} at most.",
        "full_batch": f"Full batch: every {one} in every step.",
    }[plan.sampler.law]


def sampling_executed(plan: DPPlan) -> str:
    """Return the sampling scheme that was executed."""
    if plan.guarantee != "dp":
        return sampling_assumed(plan)
    several = plan.unit.several
    drawn = {
        "poisson": f"drawn by geometric gaps between chosen {several}, which is exactly the "
        "assumed law; batches vary in size and may be empty",
        "truncated_poisson": "drawn by geometric gaps, then cut to a uniformly random subset where "
        "the cap was exceeded",
        "full_batch": f"all {several} of the store",
    }[plan.sampler.law]
    return (
        f"The object that draws the batches is the one accounted for: {drawn}. Keys are new from "
        "the operating system at every start."
    )


CLIPPED = {
    "hard": "scaled down to the clip norm if it is longer",
    "automatic": "divided by its norm plus 0.01 and multiplied by the clip norm, so that it is "
    "always shorter",
}
"""How a gradient is clipped, by ``DPPlan.clipping``."""


def clipping(plan: DPPlan, *, head: bool) -> str:
    """Return what bounds the influence of a record, or of a person who is drawn."""
    if plan.max_grad_norm is None:
        return "None."
    clipped, unit, k = CLIPPED[plan.clipping], plan.unit, plan.unit.max_records
    if head:
        row = "those of one image" if k == 1 else f"the mean over at most {k} images of one label"
        of_person = f" A person has one row of features, {row}."
        return (
            f"Each {unit.drawn}'s whole contribution to a release (the gradient of the head, or "
            f"its moments and counts together) is {clipped} (norms in float64)."
            f"{of_person if unit.draws_people else ''}"
        )
    views = ". Augmented views of a record are averaged first."
    if unit.draws_people:
        views = (
            f": the mean over {k} of the person's images and their augmented views; where there "
            "are fewer, images repeat."
        )
    return (
        f"Each {unit.drawn}'s whole gradient, all trained parameters together, is {clipped} "
        f"(norms in float32 or wider){views}"
    )


LARGEST_FOUND = 0.9950005
"""Largest change of a sum by one record found by the searches of tests/attacks, in clip norms."""


def sensitivity(plan: DPPlan, config: dict[str, Any]) -> str:
    """Return how far one record can move a step's sum as computed, and whether that is proven
    (docs/clipping.md).
    """
    if plan.max_grad_norm is None:
        return "Unbounded."
    moved = (
        f"One {plan.unit.drawn} moves the sum of a step by at most {plan.max_grad_norm:g} in "
        "Euclidean norm"
    )
    if is_head(config):
        return (
            f"{moved}, including rounding: contributions are clipped to 4 millionths less and "
            "summed in float64."
        )
    kept = f"gradients are clipped to {100 * RESERVE:g}% less"
    hardware = config["hardware"]
    proven = (hardware["precision"] == "float32" or hardware["device"] == "cpu") and config[
        "model"
    ]["encoder"].get("kind") == "vit"
    if not proven:
        return (
            f"{moved}, but for rounding this is measured, not proven; {kept}, and the largest "
            f"move found is {LARGEST_FOUND:.4f} times that."
        )
    return (
        f"{moved}, including rounding: {kept}, and rounding is proven to add at most "
        f"{100 * added_bound():.2f}%. That a record's bits do not depend on the other rows of a "
        "pass was checked on public records at every start. The largest move found is "
        f"{LARGEST_FOUND:.4f} times the bound."
    )


def noise_generator(plan: DPPlan) -> str:
    """Return the source of the noise, its precision, and its limits."""
    if plan.noise.multiplier == 0:
        return "No noise."
    return (
        "ChaCha20, a cryptographic stream cipher, with a 256-bit key from the operating system, "
        "new at every start; it also gives the draws of batches and every other secret random "
        "number. Normal numbers by Box-Muller in float64, up to 13.37 standard deviations "
        "(exceeded with probability 9e-41). Sum plus noise is rounded in float64 to a public "
        "grid, about a millionth of the noise's standard deviation, then divided by the "
        "expected batch size. The grid is a mitigation of attacks on floating point, not a "
        "proof against them."
    )

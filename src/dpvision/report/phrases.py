"""The sentences of the statement: facts about every run, and facts that follow from a plan."""

from typing import Any

from dpvision.config import IMAGENET_MEAN, IMAGENET_STD
from dpvision.dp.rounding import RESERVE, added_bound
from dpvision.privacy.composition import Method
from dpvision.privacy.plan import DPPlan, default_delta
from dpvision.privacy.printed import one_in, up, up_delta
from dpvision.privacy.refusal import MAX_DELTA
from dpvision.report.numbers import count, factor, percent_up

TRUST_MODEL = (
    "Whoever runs the training is trusted with the images. The guarantee holds against "
    "everybody who receives what is released, even if they see the weights after every single "
    "step. It assumes that they learn neither the random keys of the run nor which images a "
    "step has drawn."
)
ADJACENCY = (
    "Add or remove one: two sets of images are neighbours if one has one image more than the "
    "other and they are otherwise equal."
)
RECORD = (
    "One record: an image with all its captions and labels. Files with identical image bytes "
    "are one record."
)
DATASET_SIZE = (
    "The number of images is a declared, public constant of the plan. The sampling rate and the "
    "divisor follow from it, never from the number of images in the store, which may differ by "
    "up to 1% (in full batches: be up to 1% smaller)."
)
BAD_RECORDS = (
    "An image that cannot be decoded, or whose gradient is not finite, contributes exactly zero "
    "to its step. It is not replaced by another, and no step is skipped or stopped because of "
    "it."
)
HEADS = (
    "Scores in this statement were measured on public images with heads trained on public "
    "images: they cost no privacy. A head trained on private images needs a guarantee of its "
    "own, which this statement does not give."
)
NO_AUDITS = (
    "No attack was run against this model. The bounds on attacks in this statement are proven "
    "and do not rely on one."
)
SIDE_CHANNELS = [
    "Time: the duration of a step depends on how many images it drew. Times are not released.",
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
    "Checkpoints (weights, moving average, optimizer state), settings, ledger, public scores, "
    "this statement, report.html."
)
"""What a run of a network may release."""
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


def in_words(plan: DPPlan, guarantee: dict[str, Any] | None) -> list[str]:
    """Return paragraphs that explain the headline to a reader who does not know epsilon."""
    if guarantee is None:
        return [
            "Its images were imported as public or are synthetic, and nothing was done to hide "
            f"any of them: the model may reproduce them.{simulated(plan)}",
            "The figures below describe what was executed. None of them is a statement about "
            "privacy.",
        ]
    epsilon, delta, attack = guarantee["epsilon"], guarantee["delta"], guarantee["attack"]
    seen = (
        "the model after every step"
        if plan.selection is None
        else "the model that was chosen, with its score,"
    )
    return [
        f"Remove any one of the {plan.dataset_size:,} images, with everything that belongs to "
        "it. Any result of this training could have occurred without it as well: its "
        f"probability changes by a factor of at most e^epsilon = {factor(epsilon)}, up to delta, "
        f"{one_in(delta)}.",
        f"For scale, take the strongest attacker: one who knows all other images, sees {seen} "
        "and only has to decide whether one given image was used. If a fair coin had decided "
        f"its use, no method would be right more than {percent_up(attack['coin_accuracy'])} of "
        "the time; guessing is right 50% of the time.",
        "If the attacker may accuse only 1 in 100 of the images that were not used, at most "
        f"{percent_up(attack['tpr_at_fpr_0.01'])} of those that were used can be found; if only "
        f"1 in 1,000, at most {percent_up(attack['tpr_at_fpr_0.001'])}. Blind guessing would "
        "find 1% and 0.1%.",
        "These are proven worst-case limits, not measurements; real attackers know less. "
        f"{tier(epsilon)} What many images have in common is learned on purpose and is not "
        "protected: the guarantee is for each single image.",
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


def released(plan: DPPlan) -> str:
    """Return what may be released."""
    if plan.guarantee != "dp":
        return f"{FILES} Any of them may reveal the content of the images."
    return f"{FILES} They depend on the private images only through noisy sums."


def not_covered(plan: DPPlan) -> list[str]:
    """Return what the guarantee does not cover."""
    if plan.guarantee != "dp":
        return ["Everything: no image of this run is protected."]
    return [CONFIDENTIAL, *of_every_guarantee(persons=plan.num_units is not None)]


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


def unit(plan: DPPlan) -> str:
    """Return the unit of the guarantee."""
    k = plan.max_records_per_unit
    if plan.num_units is None:
        return RECORD
    return (
        f"One person, with all their images: {plan.num_units:,} people are declared, a public "
        f"number. {RECORD} At most {k} of a person take part. The headline has the epsilon of a "
        "person, unit_epsilon. The figure called epsilon is for one image of a person with no "
        "more images than that: with more, removing one lets another take part."
    )


def delta_rule(plan: DPPlan, num_parents: int) -> str:
    """Return how delta was chosen."""
    default = (
        "1 / (2 N)" if plan.delta < MAX_DELTA else f"{up_delta(MAX_DELTA)}, the largest default"
    )
    rule = default if plan.delta == default_delta(plan.unit.population) else "set explicitly"
    whom = "images" if plan.num_units is None else "people"
    joined = (
        f" With {count(num_parents, 'earlier run')} in the lineage, every figure holds at the "
        "smallest delta."
        if num_parents
        else ""
    )
    return (
        f"{rule}, N being the declared number of {whom}; training is refused when N x delta "
        f"exceeds 1.5.{joined}"
    )


def composition(num_runs: int, method: Method) -> str:
    """Return how the epsilons of the runs behind the weights were combined."""
    return (
        f"The weights come from {count(num_runs, 'run')} on this store. {COMPOSITION[method]}"
        if num_runs > 1
        else COMPOSITION[method]
    )


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


def trust_model(plan: DPPlan) -> str:
    """Return the trust model: who may see what."""
    if plan.selection is None:
        return TRUST_MODEL
    return TRUST_MODEL.replace(
        "the weights after every single step",
        "all steps of the run that was chosen, and nothing of the others",
    )


def deduplicated(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return which private twins were left out of a public store (``data overlap --out``), or None
    if none were searched for.
    """
    if record is None:
        return None
    stores = ", ".join(store_id[:8] for store_id in record["against"])
    return {
        "against": record["against"],
        "methods": record["methods"],
        "text": (
            f"Public images that are also in store {stores} were left out before training on "
            f"this store ({'; '.join(record['methods'])}). Their number is not given because it "
            "depends on the private images."
        ),
    }


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
    q, one = f"probability {plan.sample_rate:.6g}", plan.sampling_unit
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
    several = "records" if plan.sampling_unit == "record" else "people"
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


def clipping(plan: DPPlan) -> str:
    """Return what bounds a record's influence."""
    if plan.max_grad_norm is None:
        return "None."
    factor = CLIPPED[plan.clipping]
    return (
        f"Each record's whole gradient, all trained parameters together, is {factor} (norms in "
        "float32 or wider). Augmented views of a record are averaged first."
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
        f"One {plan.sampling_unit} moves the sum of a step by at most {plan.max_grad_norm:g} in "
        "Euclidean norm"
    )
    if config["model"].get("kind") == "head":
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
        "number. Normal numbers by Box-Muller in float64, up to 9.49 standard deviations "
        "(exceeded with probability 2e-21). Sum plus noise is rounded in float64 to a public "
        "grid, about a millionth of the noise's standard deviation, then divided by the "
        "expected batch size. The grid is a mitigation of attacks on floating point, not a "
        "proof against them."
    )


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


TOKENIZER = (
    "Tokenizer: trained on text declared to be public or synthetic; the command that trains it "
    "refuses private stores. It is released with the weights. Captions were cleaned and "
    "truncated at import, each independently."
)


def preprocessing(config: dict[str, Any]) -> list[str]:
    """Return what was derived from the data before training."""
    data = config["data"]
    told = config["model"].get("kind") == "captioner"
    own = (
        "person's own ids"
        if config["privacy"].get("sampling_unit") == "person"
        else "record's own id"
    )
    public = tuple(data["mean"]) == IMAGENET_MEAN and tuple(data["std"]) == IMAGENET_STD
    return [
        "Normalisation constants: "
        f"""{
            "those of ImageNet, public"
            if public
            else "set in the config, declared not to come from private images"
        }.""",
        "Unreadable and oversized files were left out at import, each independently of the "
        "others. Identical files were merged into one record.",
        *([TOKENIZER] if told else []),
        f"Crops, flips{', the choice among captions' if told else ''} and masks depend on the "
        f"seed, the step and the {own} only.",
    ]

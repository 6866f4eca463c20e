"""The statement's sentences for a guarantee per person: if people are declared, and if the plan
draws them (``sampling_unit``).
"""

from typing import Any

from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import one_in, up
from dpvision.report.numbers import factor, percent_up
from dpvision.report.phrases import CLIPPED, RECORD, tier

ADJACENCY_OF_PEOPLE = (
    "Add or remove one person: two sets of images are neighbours if one has one person more "
    "than the other, with all their images, however many, and they are otherwise equal."
)
NUMBER_OF_PEOPLE = (
    "The numbers of people and of images are declared, public constants of the plan. The "
    "sampling rate and the divisor follow from the declared number of people, never from the "
    "numbers in the store, which may differ by up to 1% (in full batches there may be up to 1% "
    "fewer people). How many images a person has is secret."
)
BAD_IMAGES = (
    "An image that cannot be decoded, or that has no caption or label where one is needed, "
    "counts as one that the person does not have. A person without any other image, or whose "
    "gradient is not finite, contributes exactly zero to the step. No one else is drawn in that "
    "person's place, and no step is skipped or stopped because of it."
)


def in_words(plan: DPPlan, guarantee: dict[str, Any]) -> list[str]:
    """Return the paragraphs that explain the headline, like ``phrases.in_words`` for a record.

    Args:
        guarantee: must have unit_epsilon and unit_attack.
    """
    delta, attack, k = guarantee["delta"], guarantee["unit_attack"], plan.max_records_per_unit
    said = plan.unit.stated(guarantee["epsilon"], guarantee["unit_epsilon"])
    epsilon = said.epsilon
    seen = (
        "the model after every step"
        if plan.selection is None
        else "the model that was chosen, with its score,"
    )
    drawn = plan.sampling_unit == "person"
    images = ("one image" if k == 1 else f"at most {k} images") + (" in each step" if drawn else "")
    single = (
        ""
        if said.of_image is None
        else f" For a single image of a person with at most {k}, epsilon is {up(said.of_image, 2)}."
    )
    return [
        f"Remove any one of the {plan.unit.population:,} people, with all their images, of which "
        f"{images} took part. Any result of this training could have occurred without them as "
        f"well: its probability changes by a factor of at most e^epsilon = {factor(epsilon)}, up "
        f"to delta, {one_in(delta)}.{single}",
        "For scale, take the strongest attacker: one who knows the images of all other people, "
        f"sees {seen} and only has to decide whether one given person took part. If a fair coin "
        "had decided it, no method would be right more than "
        f"{percent_up(attack['coin_accuracy'])} of the time; guessing is right 50% of the time.",
        "If the attacker may accuse only 1 in 100 of the people who did not take part, at most "
        f"{percent_up(attack['tpr_at_fpr_0.01'])} of those who did can be found; if only 1 in "
        f"1,000, at most {percent_up(attack['tpr_at_fpr_0.001'])}. Blind guessing would find 1% "
        "and 0.1%.",
        "These are proven worst-case limits, not measurements; real attackers know less. "
        f"{tier(epsilon)} What many people have in common is learned on purpose and is not "
        "protected: the guarantee is for each single person.",
    ]


def unit(plan: DPPlan) -> str:
    """Return the unit of the guarantee of a plan that draws people."""
    return one_person(
        plan,
        f"At most {plan.max_records_per_unit} of a person's images take part in a step, chosen "
        "from the seed, the step and those images' ids.",
    )


def one_person(plan: DPPlan, which: str) -> str:
    """Return the unit of a plan that draws people, with a sentence on which of their images take
    part.
    """
    return (
        f"One person, with all their images: {plan.num_units:,} people are declared, a public "
        f"number. {RECORD} People are drawn. {which} Every epsilon is for a person. There is "
        "none for a single image of a person: without it, the person still takes part."
    )


def clipping(plan: DPPlan) -> str:
    """Return what bounds the influence of a person who is drawn."""
    if plan.max_grad_norm is None:
        return "None."
    return (
        "Each person's whole gradient, all trained parameters together, is "
        f"{CLIPPED[plan.clipping]} (norms in float32 or wider): the mean over "
        f"{plan.max_records_per_unit} of the person's images and their augmented views; where "
        "there are fewer, images repeat."
    )

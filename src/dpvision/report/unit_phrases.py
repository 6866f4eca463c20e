"""The statement's sentences for a guarantee per person, if the import recorded the unit (person) of each record."""

from typing import Any

from dpvision.privacy.plan import DPPlan
from dpvision.report.numbers import factor, one_in, percent_up, round_up, short
from dpvision.report.phrases import tier


def summary(plan: DPPlan, guarantee: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the headline and the paragraphs that explain it, like ``phrases.summary`` for a record.

    Args:
        guarantee: must have unit_epsilon and unit_attack.
    """
    epsilon, delta, attack, k = guarantee["unit_epsilon"], guarantee["delta"], guarantee["unit_attack"], plan.max_records_per_unit
    seen = "the model after every step" if plan.selection is None else "the model that was chosen, with its score,"
    images = "one image" if k == 1 else f"at most {k} images"
    headline = f"Differential privacy with epsilon {round_up(epsilon, 2)} and delta {short(delta)} for each person, with all their images."
    single = f" For a single image of a person epsilon is {round_up(guarantee['epsilon'], 2)}." if k > 1 else ""
    return headline, [
        f"Remove any one of the {plan.population:,} people, with all their images, of which {images} took part. Any result of this "
        "training could have occurred without them as well: its probability changes by a factor of at most "
        f"e^epsilon = {factor(epsilon)}, up to delta, {one_in(delta)}.{single}",
        f"For scale, take the strongest attacker: one who knows the images of all other people, sees {seen} and only "
        "has to decide whether one given person took part. If a fair coin had decided it, no method would be right more than "
        f"{percent_up(attack['coin_accuracy'])} of the time; guessing is right 50% of the time.",
        f"If the attacker may accuse only 1 in 100 of the people who did not take part, at most {percent_up(attack['tpr_at_fpr_0.01'])} of "
        f"those who did can be found; if only 1 in 1,000, at most {percent_up(attack['tpr_at_fpr_0.001'])}. Blind guessing would find 1% "
        "and 0.1%.",
        f"These are proven worst-case limits, not measurements; real attackers know less. {tier(epsilon)} What many people have in common "
        "is learned on purpose and is not protected: the guarantee is for each single person.",
    ]

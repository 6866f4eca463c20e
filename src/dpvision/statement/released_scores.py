"""What a statement says about scores on private test images that were released with noise."""

import hashlib
from typing import Any

from dpvision.eval.score_file import KEPT
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import count, short, up, up_delta
from dpvision.weights import canonical


def kept(releases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a statement keeps of a run's releases (``score_file.read_releases``), with the
    SHA-256 of each whole entry.
    """
    return [
        {name: one[name] for name in KEPT} | {"sha256": hashlib.sha256(canonical(one)).hexdigest()}
        for one in releases
    ]


def stated(releases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a statement's entries about what it keeps of releases."""
    return [{**one, "text": text(one)} for one in releases]


def text(release: dict[str, Any]) -> str:
    """Return what was released, with its guarantee and the total of the test store."""
    plan, charged = DPPlan.from_dict(release["plan"]), release["charged"]
    said = plan.unit.stated(plan.epsilon or 0.0, plan.unit_epsilon)
    store, whose = release["store_id"][:12], "persons" if plan.unit.is_person else "images"
    runs, total = charged["runs"], ""
    if runs:
        total = (
            ": no total holds, because a run was without a guarantee"
            if charged["after"] is None
            else f": with this release epsilon {up(charged['after'])} at delta "
            f"{up_delta(charged['delta'])} in total, if their settings were fixed beforehand"
        )
    averaged = "averaged weights" if release["averaged_weights"] else "weights"
    calibration = release["calibration"]
    calibrated = (
        "not calibrated"
        if calibration is None
        else f"calibrated (temperature {short(calibration['temperature'])}"
        + (f", offset {short(calibration['offset'])})" if calibration["offset"] else ")")
    )
    return (
        f"Scores on private test store {store} of the {averaged} {release['weights'][:12]}, "
        f"{calibrated}: one table of counts of {plan.unit.population:,} "
        f"{whose}, declared, with Gaussian noise of standard deviation {short(plan.noise_std)} on "
        "a sum of L2 sensitivity 1; all released figures follow from it. It has epsilon "
        f"{up(said.epsilon)} and delta {up_delta(plan.delta)} for each {said.whom} of that "
        f"store. When it was released, {count(runs, 'other run') if runs else 'no other run'} had "
        f"been charged to that store{total}. Later charges are not counted here."
    )


def not_covered(releases: list[dict[str, Any]]) -> list[str]:
    """Return what the guarantees of releases do not cover."""
    return [
        f"The choice to release scores on private test store {one['store_id'][:12]}: confidential "
        "scores of this run on it had been computed before, and may have decided it."
        for one in releases
        if one["confidential_scores_first"]
    ]

"""The statement's sentences about a head on frozen features, where they differ from a trained
network's.
"""

from typing import Any

from dpvision.privacy.plan import DPPlan
from dpvision.report import unit_phrases
from dpvision.report.phrases import CLIPPED

HEADS = (
    "This run releases a head: it was trained on the private images under this guarantee, and "
    "scores measured with it on public images cost no further privacy. Its encoder was not "
    "changed."
)

FILES = "The head (weight and bias), settings, ledger, public scores, this statement, report.html."
"""What a head's run may release."""

_NOT_SETTINGS = {"recipe", "privacy", "init_from", "public_weights"}
"""Config entries left out: they are elsewhere in the statement, or are local paths."""


def is_head(config: dict[str, Any]) -> bool:
    """Return whether a run's config is of a head."""
    return config["model"].get("kind") == "head"


def released(plan: DPPlan) -> str:
    """Return what may be released."""
    if plan.guarantee != "dp":
        return f"{FILES} Any of them may reveal the content of the images."
    return (
        f"{FILES} They depend on the private images only through noisy sums. Features of the "
        "images stay with the store."
    )


def clipping(plan: DPPlan) -> str:
    """Return what bounds the influence of a record, or of a person who is drawn."""
    if plan.max_grad_norm is None:
        return "None."
    factor, k, row = CLIPPED[plan.clipping], plan.max_records_per_unit, ""
    if plan.sampling_unit == "person":
        row = (
            " A person has one row of features, "
            f"""{
                "those of one image" if k == 1 else f"the mean over at most {k} images of one label"
            }."""
        )
    return (
        f"Each {plan.sampling_unit}'s whole contribution to a release (the gradient of the head, "
        f"or its moments and counts together) is {factor} (norms in float64).{row}"
    )


def unit_of_people(plan: DPPlan) -> str:
    """Return the unit of the guarantee of a plan that draws people."""
    k = plan.max_records_per_unit
    which = (
        "One image of each person takes part"
        if k == 1
        else f"At most {k} images of a person take part, with one label"
    )
    return unit_phrases.one_person(
        plan,
        f"{which}, in every release the same, chosen from the seed and that person's ids and "
        "labels.",
    )


def preprocessing(config: dict[str, Any]) -> list[str]:
    """Return what was derived from the data before the first release."""
    model = config["model"]
    public = (
        "The encoder's mean over procedural textures, which contain no private data, was "
        "subtracted from every feature."
    )
    centre = f" {public}" if model["centre"] == "textures" else ""
    chosen = (
        f" The head was chosen from declared numbers alone: {model['reason']}."
        if model.get("reason")
        else ""
    )
    return [
        "Features: of one centre crop of each image, by an encoder that this run did not train; "
        "encoders whose features of an image depend on other images are refused. Normalisation "
        f"constants are the encoder's.{centre}",
        f"Labels: {model['num_classes']} classes, "
        f"declared{'; a record may have several' if model.get('multi_label') else ''}.{chosen}",
        "Unreadable and oversized files were left out at import, each independently of the "
        "others. Identical files were merged into one record.",
    ]


def settings(kept: dict[str, Any], encoder: dict[str, Any]) -> dict[str, Any]:
    """Return settings without local paths; the encoder is given by its public name and
    fingerprint.
    """
    frozen = {key: value for key, value in kept["model"]["encoder"].items() if key != "spec"}
    frozen |= {
        "name": encoder["name"],
        "licence": encoder["licence"],
        "fingerprint": encoder["fingerprint"],
    }
    unused = (
        {"labels"}
        if kept["model"]["candidates"]
        else {"labels", "candidates", "selection_runs", "selection_shape"}
    )
    return {
        **kept,
        "model": {**{k: v for k, v in kept["model"].items() if k not in unused}, "encoder": frozen},
    }


def settings_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of model, data, optimizer, hardware and seed, without local paths."""
    config = manifest["config"]
    kept = {
        **{k: v for k, v in config.items() if k not in _NOT_SETTINGS},
        "data": {k: v for k, v in config["data"].items() if k != "store"},
    }
    return settings(kept, manifest["encoder"]) if is_head(config) else kept

"""The statement's sentences about what was derived from the data before training."""

from typing import Any

from dpvision.config import IMAGENET_MEAN, IMAGENET_STD
from dpvision.privacy.plan import DPPlan

BY_TEXTURES = (
    " The encoder's mean over procedural textures, which contain no private data, was subtracted "
    "from every feature."
)
BY_PUBLIC_IMAGES = (
    " The mean over public images, which the lineage names, was subtracted from every feature, and "
    "the difference divided by their spread."
)
TOKENIZER = (
    "Tokenizer: trained on text declared to be public or synthetic; the command that trains it "
    "refuses private stores. It is released with the weights. Captions were cleaned and "
    "truncated at import, each independently."
)
LEFT_OUT = (
    "Unreadable and oversized files were left out at import, each independently of the others. "
    "Identical files were merged into one record."
)


def preprocessing(plan: DPPlan, config: dict[str, Any]) -> list[str]:
    """Return what was derived from the data before training."""
    data = config["data"]
    captions = config["model"].get("kind") == "captioner"
    own = f"{plan.unit.drawn}'s own id{'s' if plan.unit.draws_people else ''}"
    constants = (
        "those of ImageNet, public"
        if tuple(data["mean"]) == IMAGENET_MEAN and tuple(data["std"]) == IMAGENET_STD
        else "set in the config, declared not to come from private images"
    )
    return [
        f"Normalisation constants: {constants}.",
        LEFT_OUT,
        *([TOKENIZER] if captions else []),
        f"Crops, flips{', the choice among captions' if captions else ''} and masks depend on the "
        f"seed, the step and the {own} only.",
    ]


def head_preprocessing(config: dict[str, Any]) -> list[str]:
    """Return what was derived from the data before a head's first release."""
    model = config["model"]
    centre = BY_TEXTURES if model["centre"] == "textures" else ""
    if model.get("public_store") is not None:
        centre = BY_PUBLIC_IMAGES
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
        LEFT_OUT,
    ]

"""The model card of an export, in Hugging Face's format. Its section on privacy repeats the run's
statement: no figure is computed or rounded here.
"""

import re
from typing import Any

from dpvision.data.transform import ENLARGEMENT, LibraryData
from dpvision.export.product import Product
from dpvision.statement.guarantee import NOTHING

PIPELINES = {
    "encoder": "image-feature-extraction",
    "classifier": "image-classification",
    "captioner": "image-to-text",
}
_LIBRARIES = {"safetensors": "pytorch"}
_MAKES = {
    "encoder": "features of images, for searching, comparing and training small models on them",
    "classifier": "scores of images for the classes below",
    "captioner": "captions of images",
}
_SHOWN = 100


def model_card(product: Product, to: str, how_to_load: str) -> str:
    """Return the text of README.md.

    Args:
        how_to_load: Python that loads the model, run in the folder of the export.
    """
    statement = product.statement
    tags = ["dpvision"]
    if statement is not None and statement["guaranteed"]:
        tags.append("differential-privacy")
    front = [
        "license: other",
        f"library_name: {_LIBRARIES.get(to, to)}",
        f"pipeline_tag: {PIPELINES[product.kind]}",
        "tags:",
        *(f"- {tag}" for tag in tags),
    ]
    parts = [
        "---\n" + "\n".join(front) + "\n---",
        f"# {product.recipe}, run {product.run_id[:8]}",
        _use(product),
        "## How to load\n\nIn this folder:\n\n```python\n" + how_to_load.rstrip() + "\n```",
        _privacy(statement),
        _preprocessing(product, to),
        *([_classes(product)] if product.class_names else []),
        "## Licence\n\nThe owner of these weights chooses their licence: replace `license` above. "
        + (
            "Earlier weights and images behind them are listed under Lineage, with their licences."
            if statement is not None
            else "Do not publish them."
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _use(product: Product) -> str:
    return (
        f"## Intended use\n\nThis model gives {_MAKES[product.kind]}. It was trained with dpvision "
        f"by recipe `{product.recipe}`, and is meant for images like those it was trained on. "
        "Measure it on images of your own before you rely on it."
    )


def _privacy(statement: dict[str, Any] | None) -> str:
    if statement is None:
        return (
            f"## Privacy\n\n**{NOTHING}** These weights were trained on private images without a "
            "guarantee: they may reproduce them. Keep this folder where the images are kept."
        )
    listed = "\n".join(f"- {text}" for text in statement["scope"]["not_covered"])
    lineage = "\n".join(f"- {entry['text']}" for entry in statement["history"]["lineage"])
    return "\n\n".join(
        [
            f"## Privacy\n\n**{statement['headline']}**",
            *statement["in_words"],
            f"Trust model: {statement['scope']['trust_model']}",
            f"Unit: {statement['scope']['unit']['text']}",
            *([f"### Not covered\n\n{listed}"] if listed else []),
            *(
                [f"### Other runs on the store\n\n{statement['history']['other_runs']['text']}"]
                if statement["guaranteed"]
                else []
            ),
            f"### Lineage\n\n{lineage}",
            "[statement.json](statement.json) has every figure. `dpvision verify` checks it in "
            "the run's folder.",
        ]
    )


def _preprocessing(product: Product, to: str) -> str:
    data, size = product.data, product.image_size
    box, sizes = "the centred square over the shorter side", product.data.own_sizes
    if data.resize is not None:
        box = "the whole image, its aspect ratio ignored"
        if data.crop == "centre":
            box = f"the centre of side {size} of the image resized to {data.resize} x {data.resize}"
    filtered = "bicubic"
    if isinstance(data, LibraryData):
        side, filtered = data.library.side, data.library.filter
        whole = f"shorter side {side} px" if data.library.keep_aspect else f"{side} x {side} px"
        box = f"the centre of the image resized to {whole}"
    lines = [
        f"- RGB, {size} x {size} pixels from {box}, {filtered}",
        f"- pixels from 0 to 1, minus {list(data.mean)}, divided by {list(data.std)}",
    ]
    if sizes:
        lines.insert(
            1,
            f"- of each image only the largest side of {list(sizes)} that is at most {ENLARGEMENT} "
            "times its shorter side, or the smallest: in the top left corner, and NaN elsewhere",
        )
    if product.window is not None:
        low, high = product.window
        lines.append(f"- grey of more than 8 bits: {low} becomes black and {high} white")
    if product.kind == "captioner" and product.preprocessing["crop"] == "centre":
        lines.append("- `dpvision caption` takes the whole image, unless `--fit crop` is given")
    if to != "safetensors":
        lines.append(
            "- dpvision shows transparency over white and scales samples of more than 8 bits to 0 "
            "... 255. Pillow's `convert` does not: make 8-bit RGB files of such images first"
        )
    return "## Preprocessing\n\n" + "\n".join(lines)


def _classes(product: Product) -> str:
    names, thresholds_K = product.class_names, product.thresholds_K
    above = (
        [""] * len(names) if thresholds_K is None else [f", above {t:.6g}" for t in thresholds_K]
    )
    text = "\n".join(f"{k}. {_code(name)}{above[k]}" for k, name in enumerate(names[:_SHOWN]))
    more = f"\n\nand {len(names) - _SHOWN:,} more." if len(names) > _SHOWN else ""
    over = "" if product.temperature == 1 else f" divided by {product.temperature:.6g}"
    rule = "" if thresholds_K is None else "; a class is predicted above its threshold"
    return (
        "## Classes\n\nIn the order of the scores. Probabilities are the "
        f"{product.loss} of the scores{over}{rule}:\n\n{text}{more}"
    )


def _code(name: str) -> str:
    """A name as code of Markdown, in which nothing else is markup."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", name)), default=0))
    return f"{ticks} {name} {ticks}" if "`" in name else f"`{name}`"

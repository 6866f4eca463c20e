"""``dpvision export``: write a trained model in another program's format, or what it states in a
form that others read.
"""

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import tyro

from dpvision.cli.output import RunPath, emit, pairs, parse
from dpvision.cli.paths import check_run, check_store
from dpvision.cli.progress import ProgressLine
from dpvision.errors import OPERATOR_ONLY, ConfigError
from dpvision.privacy.printed import size


def export(
    run: RunPath,
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    to: Literal[
        "timm", "transformers", "onnx", "safetensors", "peft", "opendp", "cyclonedx", "sacro"
    ],
    ema: bool = False,
    encoder: str | None = None,
    declared: Path | None = None,
    test: Path | None = None,
    json: bool = False,
) -> None:
    """Write a run's model in another program's format, with a model card and the statement.

    The folder is written whole or not at all. The model in it was loaded by the format's own
    library and gave the run's outputs. docs/export.md has a table of what each format can hold.
    Optimizer state and everything confidential stay in the run.

      dpvision export runs/first exported --to onnx
      dpvision export runs/first exported-timm --to timm --ema
      dpvision export runs/head exported-head --to safetensors --encoder timm:NAME@moved/FILE
      dpvision export runs/first entry --to opendp --declared declared.json
      dpvision export runs/first confidential/sacro --to sacro --test stores/test

    Args:
        run: Run folder.
        out: New folder to write. For weights trained on private images without a guarantee its path
            needs a folder named confidential.
        to: timm (timm.create_model("local-dir:DIR")), transformers (save_pretrained), onnx,
            safetensors (with one file of plain PyTorch), peft (LoRA alone, on timm's model). What
            is stated, without the model: opendp (an entry of the OpenDP deployments registry),
            cyclonedx (a bill of materials, CycloneDX 1.7). For the operator: sacro (a classifier's
            probabilities of single images, which SACRO-ML attacks; docs/output_checkers.md).
        ema: Export the averaged weights.
        encoder: A head's encoder, if it has moved since the run: as for dpvision adapt --encoder.
        declared: For opendp and cyclonedx: JSON file with name, curators, intended_use, region,
            publication_date, sector and justification.
        test: For sacro: store of images that the run was not trained on.
        json: Print JSON.
    """
    check_run(run)
    if test is not None and to != "sacro":
        raise ConfigError(f"export: --test with --to {to}; expected it with sacro alone. Drop it.")
    if to == "opendp" or to == "cyclonedx":
        _form(run, out, to, declared, json)
        return
    if declared is not None:
        raise ConfigError(
            f"export: --declared with --to {to}; expected it with opendp or cyclonedx alone. Drop "
            "it."
        )
    if to == "sacro":
        _target(run, out, test, ema, encoder, json)
        return
    from dpvision.export.write import export as write

    made = write(run, to, out, ema=ema, encoder=encoder)
    text = "\n".join(
        [
            f"{made.folder}, for {to}; largest difference from the run's outputs "
            f"{made.difference:.1e}",
            pairs({name: size(num_bytes) for name, num_bytes in made.files.items()}),
            *([made.headline] if made.headline else []),
            "To load it, in that folder:",
            made.how_to_load.rstrip(),
        ]
    )
    emit(
        {
            "out": str(made.folder),
            "to": to,
            "difference": made.difference,
            "files": made.files,
            "headline": made.headline,
        },
        json,
        text,
    )


def _form(
    run: Path, out: Path, to: Literal["opendp", "cyclonedx"], declared: Path | None, json: bool
) -> None:
    from dpvision.export.forms import write_form
    from dpvision.statement.declarations import read_declared

    if declared is None:
        raise ConfigError(
            f"export: --to {to} without --declared; expected a JSON file of what only you know: "
            "name, curators, intended_use, region, publication_date, sector, justification. "
            "docs/export.md has one to copy."
        )
    file = write_form(run, to, out, read_declared(declared, "export"))
    emit(
        {"out": str(file), "to": to},
        json,
        f"{file}, made of the statement beside it. Figures and sentences on privacy are the "
        "statement's; read the rest before you publish it.",
    )


def _target(
    run: Path, out: Path, test: Path | None, ema: bool, encoder: str | None, json: bool
) -> None:
    if test is None:
        raise ConfigError(
            "export: --to sacro without --test; expected a store of images that the run was not "
            "trained on. Hold some out before training: dpvision data split."
        )
    check_store(test)
    from dpvision.export.sacro import write_target

    with ProgressLine(private=True) as line:
        target = write_target(run, out, test, ema=ema, encoder=encoder, progress=line.count)
    emit(
        {"out": str(target), "to": "sacro"},
        json,
        f"{target}, with the probabilities of single images: {OPERATOR_ONLY}keep it, and what the "
        f"attack writes, where the images are. To attack, with sacroml installed:\n"
        f"cd {quote(str(out))} && sacroml run . attack.yaml",
    )


run = partial(parse, export, "export")

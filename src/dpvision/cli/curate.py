"""``dpvision data curate``: from a scraped source to a store, by declared steps."""

import sys
from contextlib import redirect_stdout
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from dpvision.cli.output import FLAT, StorePath
from dpvision.cli.paths import check_source
from dpvision.cli.store_lines import Labels, Range, said
from dpvision.curate.pipeline import Pipeline, Settings
from dpvision.data.person_names import PersonRule
from dpvision.strict_json import parse_json


def curate(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    store: StorePath,
    steps: str,
    settings: Annotated[Settings, FLAT] = Settings(),
    public: bool = False,
    people: Annotated[PersonRule, FLAT] = PersonRule(),
    labels: Annotated[Labels, FLAT] = Labels(),
    range: Annotated[Range, FLAT] = Range(),
    licence: str | None = None,
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    json: bool = False,
) -> None:
    """Make a store of what declared steps leave of a source: tars (img2dataset's too), parquet
    files, both also at a URL, or a folder of images.

    Steps of one record come first; they keep the guarantee as it is. Steps that compare records
    with each other (exact_duplicates, near_duplicates, semantic_duplicates) come last; for them the
    guarantee is for the curated store, and statements say so (docs/curate.md).

    Counts, names of what was left out, and contact sheets are in the store's
    confidential/curation/. After a crash the same command goes on.

    Args:
        source: Tar, parquet file, folder or pattern such as 'scraped/*.tar'; also a URL. Captions
            are those in it: KEY.txt, KEY.json, or a column. A separate file of captions is not
            read.
        store: New folder for the store.
        steps: Names of steps in order, with commas: size,caption,faces,exact_duplicates.
        settings: The settings of the steps.
        public: These images need no protection.
        people: The persons of images.
        labels: The labels of images.
        range: The values of images of more than 8 bits, for steps and store.
        licence: Licence of public images, for the statement.
        workers: Processes that read the files of a source of several, else threads; if None, the
            cores of this machine, or of the cluster.
        engine: What reads the files: processes of this machine, or ray: the cluster at RAY_ADDRESS,
            or one of this machine alone. The same store.
        json: Print JSON.
    """
    check_source(source)
    pipeline = Pipeline.of([name.strip() for name in steps.split(",") if name.strip()], settings)
    from dpvision.curate.passes import DOWNLOADS, FOLDER
    from dpvision.curate.passes import curate as made_by

    notes = redirect_stdout(sys.stderr)  # Ray prints what it lost to the output
    with Console(stderr=True).status("looking") as status, notes:
        made = made_by(
            source,
            store,
            pipeline,
            public=public,
            people=people,
            labels=labels,
            window=range.declared("data curate"),
            licence=licence,
            workers=workers,
            engine=engine,
            progress=lambda what, n: status.update(f"{what}: {n:,} images"),
        )
    out = made.path / "confidential" / FOLDER
    counts = parse_json((out / "counts.json").read_text())
    by_step = {name: found for name, found in counts.items() if name in pipeline.names}
    more: dict[str, Any] = {"seen": counts["seen"], "curation": by_step, "curation_files": str(out)}
    if not json:
        more["curation"] = {name: _row(found) for name, found in by_step.items()}
    if (came := counts.get(DOWNLOADS)) is not None:
        more = {DOWNLOADS: came if json else _downloads(came)} | more
    if dropped := counts.get("captions_dropped"):
        more["curation_captions_dropped"] = dropped
    said(made, json, more)


def _downloads(found: dict[str, Any]) -> str:
    reasons = ", ".join(f"{num:,} {reason}" for reason, num in list(found["reasons"].items())[:3])
    return (
        f"{found['count']:,} addresses tried; {found['successes']:,} came; failed: "
        f"{found['failed_to_download']:,} to download, {found['failed_to_resize']:,} to resize"
        f"{f' (most often: {reasons})' if reasons else ''}"
    )


def _row(found: dict[str, Any]) -> str:
    reasons = ", ".join(f"{num:,} {reason}" for reason, num in found["left_out"].items())
    said = [f"{found['came']:,} came", f"left out: {reasons or 'none'}"]
    if found.get("changed"):
        said.append(f"{found['changed']:,} changed")
    if found.get("seconds"):
        said.append(f"{found['came'] / found['seconds']:,.0f} images/s a worker")
    return "; ".join(said)

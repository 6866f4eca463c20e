"""``dpvision embed``: write features to a file."""

from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from dpvision.cli.each_image import Release
from dpvision.cli.output import FLAT, Reading, SourcePath, emit, parse
from dpvision.cli.paths import check_source
from dpvision.cli.progress import ProgressLine
from dpvision.errors import OPERATOR_ONLY


def embed(
    encoder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENCODER")],
    source: SourcePath,
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    pooling: str | None = None,
    ema: bool = False,
    reading: Annotated[Reading, FLAT] = Reading(),
    release: Annotated[Release, FLAT] = Release(),
    json: bool = False,
) -> None:
    """Write an encoder's features for a store, or for any source that `data import` accepts.

    Features of private images are private: the guarantee covers the weights, not their output on an
    image. So they go to a folder named confidential. Images outside a store count as private;
    import them with --public if they are public.

    Args:
        encoder: A run folder or one of its checkpoints, random:RUN, timm:NAME or torchvision:NAME
            (@FILE for weights), hf:DIR, onnx:NODE@FILE, vip:FILE, mae:FILE, dpcap:FILE,
            simclr:FILE, tan:FILE, pixels, hog, scattering, patches, patches+scattering
            or patches+scattering+zooms.
        source: Store, folder of images, parquet file or tar file.
        out: File to write: .npz or .safetensors. For private images its path needs a folder named
            confidential.
        pooling: mean (over the image), 2x2 (over its four quadrants), cls, stages, ...
            (docs/encoders.md); the encoder's default if omitted.
        ema: Use the averaged weights of a run.
        reading: How images are read.
        release: Where features may be written.
        json: Print JSON.
    """
    reading.check("embed")
    check_source(source)
    from dpvision.encoders.embeddings import write_embeddings

    with ProgressLine("features") as line:
        made = write_embeddings(
            encoder,
            source,
            out,
            ema=ema,
            pooling=pooling,
            batch_size=reading.batch_size,
            workers=reading.workers,
            progress=lambda n: line.count("features", n),
            release_private_outputs=release.release_private_outputs,
        )
    text = f"{made.num:,} x {made.width} features in {out}"
    if made.visibility == "private":
        text = (
            f"{OPERATOR_ONLY}{text}\n"
            "These are features of private images: keep the file where the images are kept."
        )
    emit(
        {
            "out": str(out),
            "num_records": made.num,
            "width": made.width,
            "visibility": made.visibility,
        },
        json,
        text,
    )


run = partial(parse, embed, "embed")

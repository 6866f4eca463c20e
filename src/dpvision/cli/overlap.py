"""``dpvision data overlap``: find public images that are in a private store."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from dpvision.cli.output import FLAT, Reading, emit, pairs
from dpvision.cli.paths import check_store
from dpvision.data.perceptual import RADIUS
from dpvision.errors import OPERATOR_ONLY, ConfigError, PrivacyError
from dpvision.files import write_json

if TYPE_CHECKING:
    from dpvision.data.store import Store
    from dpvision.encoders.encoder import Encoder

PublicPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PUBLIC")]
PrivatePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PRIVATE")]


def overlap(
    public: PublicPath,
    private: PrivatePath,
    encoder: str | None = None,
    radius: int = RADIUS,
    threshold: float | None = None,
    exact: bool = False,
    out: Path | None = None,
    reading: Annotated[Reading, FLAT] = Reading(),
    json: bool = False,
) -> None:
    """Find images of a public store that are also in a private one, exactly or nearly.

    An encoder trained on the public store without privacy must not have seen the private images.
    Otherwise scores on them are inflated, and no epsilon covers what the encoder reveals about
    them.

      dpvision data overlap stores/public stores/mine
      dpvision data overlap stores/public stores/mine --encoder timm:vit_small_patch16_224@FILE
      --out stores/public-clean

    Matches have identical files, identical pixels, near perceptual hashes (mirrored too) or, with
    --encoder, near features (crops, shifts). The pairs are written to
    PRIVATE/confidential/overlap-NAME/, with a page that shows them side by side. --out writes the
    public store without them; the private store is never changed. docs/overlap.md states what may
    be released; the number of matches may not.

    Args:
        public: Store imported with --public.
        private: The other store.
        encoder: Also compare features of this encoder, named as for `dpvision evaluate`.
        radius: Bits of 64 in which perceptual hashes may differ, 0 to 11. A second hash always
            allows 10.
        threshold: Cosine of features above which two images match; if omitted, measured on copies
            of public images.
        exact: Only identical files and pixels.
        out: New folder next to PUBLIC, for a store of the public images without a match.
        reading: How images are read.
        json: Print JSON.
    """
    if threshold is not None and encoder is None:
        raise ConfigError(
            f"overlap: threshold={threshold} without an encoder; expected both. Give --encoder, "
            "or drop --threshold."
        )
    if exact and (encoder is not None or radius != RADIUS):
        raise ConfigError(
            "overlap: --exact with --encoder or --radius, which find near matches; expected one "
            "or the other. Drop --exact."
        )
    if threshold is not None and not -1 <= threshold < 1:
        raise ConfigError(
            f"overlap: threshold={threshold}; expected -1 <= cosine < 1. Omit it to have it "
            "measured."
        )
    reading.check("overlap")
    check_store(public, private)
    from dpvision.data.open import open_store
    from dpvision.data.overlap import HOWS, check_out, write_pairs, write_without
    from dpvision.encoders.feature_matches import find_overlap
    from dpvision.encoders.open import open_encoder, recognised
    from dpvision.report.overlap_page import write_overlap_page

    ours, theirs = open_store(public), open_store(private)
    if ours.visibility != "public":
        raise ConfigError(
            f"overlap: {public} is private; expected the public store first. Swap them, or "
            "import it with --public."
        )
    if out is not None:
        check_out(ours, out)
    opened = recognised(open_encoder(encoder), ours, theirs) if encoder is not None else None
    if out is not None and opened is not None and opened.confidential:
        raise PrivacyError(
            f"overlap: encoder={encoder!r} was trained on private images without a guarantee; "
            "expected a public one with --out: the remaining public store would depend on all "
            "of those images. Use a public encoder, or drop --out."
        )
    result: dict[str, Any] = {"public": str(public), "private": str(private)}
    with Console(stderr=True).status("reading") as status:
        overlaps = find_overlap(
            ours,
            theirs,
            None if opened is None else replace(opened, name=_named(encoder, opened)),
            radius=None if exact else radius,
            cosine=threshold,
            batch_size=reading.batch_size,
            workers=reading.workers,
            say=status.update,
        )
    found, methods = overlaps.matches, overlaps.methods
    if overlaps.threshold is not None:
        result["recall_on_public_copies"] = overlaps.threshold.recall
        result["threshold"] = overlaps.threshold.cosine
    folder = theirs.path / "confidential" / f"overlap-{ours.path.name}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    counts = {how: int((found.how_M == i).sum()) for i, how in enumerate(HOWS)}
    result |= {
        "public_pictures": ours.num_records,
        "public_pictures_with_a_match": len(found.public_M),
        "by": counts,
        "private_pictures_matched": len(np.unique(found.private_M)),
        "methods": methods,
    }
    write_pairs(folder / "pairs.jsonl", ours, theirs, found)
    result["page"] = str(write_overlap_page(folder / "overlap.html", ours, theirs, found, methods))
    write_json(folder / "summary.json", result)
    if out is not None:
        write_without(ours, out, found.public_M, theirs, methods)
        result["out"] = str(out)
    emit(result, json, _text(result, ours, out))


def _named(spec: str | None, opened: "Encoder") -> str:
    """Return an encoder's name for statements, without a local path."""
    from dpvision.checkpoint import load_checkpoint

    if spec is None or not Path(spec).is_dir():
        return opened.name
    return f"run {load_checkpoint(spec).manifest['run_id'][:8]}"


def _text(result: dict[str, Any], public: "Store", out: Path | None) -> str:
    from dpvision.cli.next_steps import to_train
    from dpvision.data.open import open_store

    count = result["public_pictures_with_a_match"]
    lines = [
        f"{OPERATOR_ONLY}{count:,} of {public.num_records:,} public images have a match among "
        "the private ones.",
        pairs({f"by {how}": number for how, number in result["by"].items()}),
    ]
    if "threshold" in result:
        recall = result["recall_on_public_copies"]
        lines += [
            f"Features match above a cosine of {result['threshold']:.3f}, which finds these "
            "shares of copied public images:",
            pairs({name: f"{share:.0%}" for name, share in recall.items()}),
        ]
    lines += [
        f"Side by side: {result['page']}",
        "Matches and their number depend on private images: do not release them.",
    ]
    if out is not None:
        lines += [
            f"Without them: {out}, readable only by you. The images missing there reveal who is "
            "in the private store: do not share it.",
            "Scores on it reveal how many are missing, so they are written under confidential/.",
            *to_train(open_store(out)),
        ]
    return "\n".join(lines)

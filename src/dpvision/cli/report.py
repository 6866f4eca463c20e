"""``dpvision report``: write the guarantee statement and the pages."""

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dpvision.cli.output import RunPath, emit, parse
from dpvision.cli.paths import check_run, check_store
from dpvision.errors import ConfigError
from dpvision.statement.schema import Stop, Tuning
from dpvision.strict_json import parse_json

if TYPE_CHECKING:
    from dpvision.report.gallery import Gallery


def report(
    run: RunPath,
    store: Path | None = None,
    public_store: Path | None = None,
    gallery: Path | None = None,
    beside: tuple[Path, ...] = (),
    gallery_num: int = 8,
    tuning: Tuning = "not_covered",
    stop: Stop = "not_declared",
    declared: Path | None = None,
    sign: Path | None = None,
    json: bool = False,
) -> None:
    """Write the statement (statement.json), the report (report.html) and the operator's page
    (confidential/operator.html).

    Epsilon is that of the plan in the ledger, all planned steps, also of a run that ended early.
    Statement and report contain nothing that depends on private records except through the
    guarantee; a run without a guarantee on a private store gets neither.

    Args:
        run: Run folder.
        store: Store that the run was trained on. Its ledgers are authoritative, and list other runs
            on the same records. If omitted, the store that the run was started with, if it still
            exists.
        public_store: Public store whose images the report shows: classified, reconstructed or
            compared, as the model allows.
        gallery: Store with captions, to show images with their reference captions and this
            captioner's. A private store appears only on the operator's page.
        beside: Runs of other captioners to show in the gallery. One trained on private images
            without privacy appears only on the operator's page.
        gallery_num: Images of each kind in the gallery: random ones, and random ones among the
            tenth with the best captions.
        tuning: How settings and checkpoint were chosen: "none" (fixed beforehand), "public" (on
            public images only), "charged" (among runs on this store by public scores: their total
            covers the choice), or "not_covered" (by looking at private results: the statement says
            that the guarantee does not cover the choice).
        stop: Of a run that ended early: "independent" declares that nothing computed from the
            private images, released or confidential, had an influence on where it ended (a crash, a
            deadline set beforehand). The statement repeats the declaration and gives the epsilon of
            the executed steps beside that of the plan.
        declared: JSON file of what only you know, as for `dpvision export --to opendp`. The report
            then also has questions of EDPB Opinion 28/2024 and a draft impact assessment (GDPR,
            art. 35), with facts filled in and judgements left open.
        sign: PEM file with an ed25519 private key. Signs the statement in statement.json.sig, which
            `dpvision verify --public-key` checks. Without it, the signature of an earlier statement
            is removed, unless the new one has the same bytes.
        json: Print JSON.
    """
    if not gallery_num >= 1:
        raise ConfigError(f"report: gallery_num={gallery_num}; expected at least 1. Omit it for 8.")
    if beside and gallery is None:
        raise ConfigError(
            "report: --beside without --gallery; expected a store with captions to show them "
            "on. Add --gallery STORE."
        )
    check_run(run, *beside)
    check_store(store, public_store, gallery)
    from dpvision.report.gallery import gallery_of_run
    from dpvision.report.operator_page import make_operator_page
    from dpvision.report.page import make_report
    from dpvision.runs.folder import read_run
    from dpvision.statement.declarations import read_declared
    from dpvision.statement.signature import (
        fingerprint,
        read_private_key,
        signature_of,
        write_signature,
    )
    from dpvision.statement.statement import read_evidence

    told = None if declared is None else read_declared(declared, "report")
    key = None if sign is None else read_private_key(sign)
    made = None if gallery is None else gallery_of_run(run, gallery, beside, count=gallery_num)
    operator = make_operator_page(run, store, gallery=made)
    signature = signature_of(run / "statement.json")
    signed, before = signature.exists(), _declared_before(run)
    page = make_report(
        run,
        public_store,
        store_dir=store,
        tuning=tuning,
        stop=stop,
        gallery=None if made is None else made.public_part(),
        declared=told,
    )
    was = read_run(run)[1].data.store
    if was is not None and read_evidence(run, store).store_dir is None:
        print(
            f"The store is not at {was} any more: the statement does not know of other runs on its "
            "records. Give --store.",
            file=sys.stderr,
        )
    now = {"tuning": tuning, "stop": stop, "declared": "FILE" if told is not None else None}
    for name, value in before.items():
        if now[name] in (None, "not_covered", "not_declared"):
            print(
                f"The report before had --{name} {value}, this one has not: give it again if it "
                "still holds.",
                file=sys.stderr,
            )
    if signed and key is None and not signature.exists():
        print(
            f"{signature.name} was removed: it signed another statement. Sign this one with --sign "
            "KEY.",
            file=sys.stderr,
        )
    written = {"statement": run / "statement.json", "report": page, "operator": operator}
    if key is not None:
        written["signature"] = write_signature(written["statement"], key)
    text = "\n".join(f"{name:10} {path}" for name, path in written.items())
    if key is not None:
        text += f"\nsigned by  the key {fingerprint(key.public_key())}"
    if made is not None:
        text += f"\n{gallery_places(made)}"
    emit({name: str(path) for name, path in written.items()}, json, text)


def _declared_before(run: Path) -> dict[str, str]:
    """Return the declarations of the report that is there, by option."""
    found = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if "<h2>Declared by the operator</h2>" in (run / "report.html").read_text():
            found["declared"] = "FILE"
        history = parse_json((run / "statement.json").read_bytes())["history"]
        found["tuning"] = history["tuning"]["declared"]
        found["stop"] = (history["stop"] or {"declared": "not_declared"})["declared"]
    return {name: value for name, value in found.items() if not value.startswith("not_")}


def gallery_places(gallery: "Gallery") -> str:
    """Return a line that says on which pages the gallery is."""
    part = gallery.public_part()
    if part is None:
        return (
            "gallery    on the operator's page only: its images are private, or their captions are"
        )
    missing = [name for name in gallery.means if name not in part.means]
    return "gallery    on both pages" + (
        f"; {', '.join(missing)} on the operator's only" if missing else ""
    )


run = partial(parse, report, "report")

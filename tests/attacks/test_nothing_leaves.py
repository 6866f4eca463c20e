"""Nothing private leaves: in worlds that differ in one private record or person, all that commands
write outside ``confidential/`` and print is the same, byte for byte, once the releases themselves
are made equal (``neighbours``); and it has none of the words planted in the private images' names,
captions and paths.

Not compared, because it is the operator's or the caller's own: lines that are marked "operator
only"; what ``data import``, ``data inspect`` and ``data split`` print, which whoever holds the
images runs; what ``caption`` and ``predict`` print of the images that they are given; the time that
commands take (the clock stands still here).
"""

import base64
import gzip
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from dpvision.runs.run import Run

from .neighbours import CHANGES, PEOPLE_CHANGES, PRIVATE_STORES, TOKENS, World, live

pytestmark = pytest.mark.usefixtures("gates_once")

MINE, TESTS = (f"stores/{name}" for name in PRIVATE_STORES)
HARDWARE = ("--hardware.device", "cpu", "--hardware.workers", "1")
NETWORK = (
    *("--data", MINE, *HARDWARE, "--hardware.physical-batch-size", "24", "--init-from", "None"),
    *("--privacy.dataset-size", "200", "--privacy.expected-batch-size", "40"),
    *("--privacy.steps", "2", "--model.encoder.image-size", "16", "--model.encoder.patch-size"),
    *("4", "--model.encoder.depth", "1", "--model.encoder.width", "32"),
    *("--model.encoder.num-heads", "2"),
)
MAE = (
    *("train", "vip.micro", *NETWORK, "--model.decoder-depth", "1"),
    *("--model.decoder-width", "32", "--model.decoder-num-heads", "2"),
)
SUPERVISED = ("train", "vip.micro_finetune", *NETWORK, "--model.num-classes", "4")
CAPTIONER = (
    *("train", "dpcap.micro", *NETWORK, "--model.decoder.depth", "1", "--model.decoder.width"),
    *("32", "--model.decoder.num-heads", "2", "--model.vocab-size", "275"),
    *("--model.num-tokens", "18", "--data.tokenizer", "words.json"),
)
DECLARED = ("--num-classes", "4", "--dataset-size", "200", "--epsilon", "4", *HARDWARE)
HEAD = (
    *("adapt", "--data", MINE, *DECLARED, "--encoder", "pixels"),
    *("--model.encoder.image-size", "8"),
)
ON_RUN = ("adapt", "--data", MINE, *DECLARED, "--encoder", "runs/mae")
RELEASE = ("--release", "4", "--privacy.dataset-size", "200")
ALL_HEADS = ("one_step", "many_steps", "least_squares", "feature_covariance", "prototypes")
ANYWHERE = "--release-private-outputs"


def scored(run: str, *options: str) -> tuple[str, ...]:
    return ("evaluate", f"runs/{run}", *options, "--workers", "1")


QUICK = [
    (*SUPERVISED, "--name", "sup"),
    (*HEAD, "--name", "auto", "--test", TESTS),
    scored("auto", "--test", TESTS, *RELEASE),
    ("report", "runs/auto"),
]
LONG = [
    (*MAE, "--name", "mae"),
    (*CAPTIONER, "--name", "cap"),
    (*SUPERVISED, "--name", "sup", "--json"),
    (*MAE, "--name", "free", "--non-private"),
    (*MAE, "--name", "dry", "--dry-run"),
    (*MAE, "--name", "mae", "--resume"),
    (*HEAD, "--name", "auto", "--test", "stores/open"),
    (*HEAD, "--name", "again", "--dry-run", "--json"),
    *[(*HEAD, "--head", head, "--name", head) for head in ALL_HEADS],
    (*HEAD, "--select", "one_step,prototypes", "--name", "chosen", "--json"),
    (*ON_RUN, "--head", "one_step", "--name", "on-mae", "--test", TESTS),
    scored("auto", "--test", "stores/open", "--per-class"),
    scored("auto", "--test", TESTS, "--per-class"),
    scored("auto", "--test", TESTS, *RELEASE),
    scored("sup", "--test", TESTS, *RELEASE, "--per-class", "--json"),
    scored("mae", "--train", "stores/open", "--protocols", "knn,ridge"),
    scored("mae", "--train", MINE, "--test", TESTS, "--protocols", "knn"),
    ("evaluate", "captioner", "runs/cap", "--store", "stores/open", "--captions"),
    ("caption", "runs/cap", "photos"),
    ("caption", "runs/cap", TESTS, "--out", "confidential/captions.csv"),
    ("embed", "runs/mae", "photos", "photos.npz", ANYWHERE),
    ("embed", "runs/mae", "stores/open", "open.safetensors"),
    ("embed", "runs/mae", TESTS, "confidential/features.npz"),
    ("embed", "runs/mae", TESTS, "features.npz"),
    ("predict", "runs/auto", "photos", "--csv", "photos.csv", ANYWHERE),
    ("predict", "runs/auto", TESTS, "--csv", "confidential/predictions.csv"),
    ("predict", "runs/auto", TESTS, "--csv", "predictions.csv"),
    *[("report", f"runs/{run}") for run in ("mae", "cap", "sup", "auto", "chosen", "free")],
    *[
        ("export", f"runs/{run}", f"exported/{run}-{to}", "--to", to, "--declared", "declared.json")
        if to in ("opendp", "cyclonedx")
        else ("export", f"runs/{run}", f"exported/{run}-{to}", "--to", to)
        for run in ("mae", "auto")
        for to in ("timm", "transformers", "onnx", "safetensors", "peft", "opendp", "cyclonedx")
    ],
    ("export", "runs/auto", "confidential/sacro", "--to", "sacro", "--test", TESTS),
    ("verify", "runs/auto/statement.json", "--run", "runs/auto"),
    ("verify", "runs/mae/statement.json", "--run", "runs/mae", "--store", MINE),
    ("data", "overlap", "stores/open", MINE),
    ("data", "overlap", "stores/open", MINE, "--out", "stores/cleared"),
    ("data", "inspect", MINE),
    ("data", "split", MINE, "stores/half-a", "stores/half-b"),
    ("ledger", MINE),
    ("plan", "vip.micro", "--dataset-size", "50000"),
    (*MAE, "--name", "refused", "--privacy.dataset-size", "100"),
]


PEOPLE = ("--privacy.num-units", "100")
TWO_EACH = (*PEOPLE, "--privacy.max-records-per-unit", "2")
DRAWN = (*TWO_EACH, "--privacy.sampling-unit", "person")
PEOPLE_QUICK = [
    (*HEAD, *DRAWN, "--head", "one_step", "--name", "auto", "--test", TESTS),
    scored("auto", "--test", TESTS, *RELEASE, *PEOPLE),
    ("report", "runs/auto"),
]
PEOPLE_LONG = [
    (*MAE, *DRAWN, "--privacy.expected-batch-size", "20", "--name", "mae"),
    (*SUPERVISED, *TWO_EACH, "--name", "sup", "--json"),
    *[(*HEAD, *DRAWN, "--head", head, "--name", head) for head in ALL_HEADS],
    *[(*HEAD, *TWO_EACH, "--head", head, "--name", f"{head}-two") for head in ALL_HEADS],
    (*ON_RUN, *DRAWN, "--head", "one_step", "--name", "on-mae", "--test", TESTS),
    scored("on-mae", "--test", TESTS, *RELEASE, *PEOPLE, "--per-class", "--json"),
    *[("report", f"runs/{run}") for run in ("mae", "sup", "on-mae")],
    *[("export", f"runs/{run}", f"exported/{run}", "--to", "onnx") for run in ("mae", "on-mae")],
    ("verify", "runs/on-mae/statement.json", "--run", "runs/on-mae", "--store", MINE),
    ("data", "overlap", "stores/open", MINE),
    ("data", "split", MINE, "stores/half-a", "stores/half-b"),
    ("ledger", MINE),
    (*HEAD, *DRAWN, "--privacy.num-units", "40", "--name", "refused"),  # fewer than there are
]
TUNE = (
    *("tune", "transfer.many_steps", "--data", MINE, *DECLARED, "--encoder", "pixels"),
    *("--model.encoder.image-size", "8", "--privacy.steps", "2", "--trials", "2"),
)
RATES, RANGE = "optim.learning_rate=3,30", "optim.learning_rate=log 1..100"
CHARGED = (*TUNE, "--how", "charged", "--test", "stores/open", "--space", RANGE)
SIMULATED = (*TUNE, "--how", "simulated", "--simulate", "4", "--space", RANGE, "--test")
CHOSEN = (*TUNE, "--how", "private-selection", "--space", RATES, "--name", "chosen", "--json")
STUDY_QUICK = [
    (*CHARGED, "--name", "study", "--trials", "1"),
    ("report", "runs/study/trial-000", "--tuning", "charged"),
]
STUDIES = [
    (*CHARGED, "--name", "study"),
    (*CHARGED, "--name", "study", "--resume", "--json"),
    ("report", "runs/study/trial-001", "--tuning", "charged"),
    (*CHARGED, "--name", "dry", "--dry-run", "--json"),
    (*SIMULATED, TESTS, "--name", "simulated"),
    (*SIMULATED, "stores/open", "--name", "simulated-again", "--json"),
    ("report", "runs/simulated/trial-000"),
    CHOSEN,
    ("report", "runs/chosen"),
    ("ledger", MINE),
]


REFUSED = {
    *("features.npz", "predictions.csv", "runs/free"),  # private outputs
    *("peft", "timm", "transformers", "safetensors"),  # formats that cannot hold the model
    "100",  # another number of records than the store has
}
"""Last arguments of the commands of ``LONG`` that are refused."""


def differences(one: World, other: World) -> list[str]:
    """What tells two worlds apart."""
    found = [
        f"{' '.join(mine.argv)}:\n{mine.public}\n{theirs.public}"
        for mine, theirs in zip(one.said, other.said, strict=True)
        if mine.public != theirs.public
    ]
    names = one.files.keys() | other.files.keys()
    return found + sorted(n for n in names if one.files.get(n) != other.files.get(n))


def layers(content: bytes) -> Iterator[bytes]:
    """The bytes of a file, and those that are packed in it: members of a zip, gzip, texts of a PNG,
    base64.
    """
    yield content
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            for name in packed.namelist():
                yield name.encode()
                yield from layers(packed.read(name))
    if content[:2] == b"\x1f\x8b":
        yield from layers(gzip.decompress(content))
    at = 8 if content[:8] == b"\x89PNG\r\n\x1a\n" else len(content)
    while at < len(content):
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        if kind in (b"zTXt", b"iTXt"):
            body = content[at + 8 : at + 8 + size].split(b"\0", 1)[1]
            for start in range(min(len(body), 64)):  # after names of the language and the keyword
                try:
                    yield zlib.decompress(body[start:])
                except zlib.error:
                    continue
        at += 12 + size
    for packed in re.findall(rb"base64,([A-Za-z0-9+/=]{16,})", content):
        yield from layers(base64.b64decode(packed))


def words_in(content: bytes) -> list[str]:
    forms = [form for word in TOKENS for form in (word, word.upper(), word.title())]
    return [
        form
        for layer in layers(content)
        for form in forms
        if any(form.encode(code) in layer for code in ("utf-8", "utf-16-le"))
    ]


def check_words(world: World) -> None:
    for name, (_, content) in world.files.items():
        # A run's folder does not name its store. Beside the stores their own names are known.
        if not name.startswith("stores/"):
            assert not words_in(content), name


def live_through(
    commands: list[tuple[str, ...]], change: str | None = None, people: bool = False
) -> World:
    """A world of this module's place, with or without a change, of records or of people."""
    changes = PEOPLE_CHANGES if people else CHANGES
    changed = (lambda samples: samples) if change is None else changes[change]
    return live(changed, commands, people)


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("worlds"))
        yield


@pytest.fixture(scope="module")
def usual() -> World:
    return live_through(QUICK)


@pytest.fixture(scope="module")
def usual_long() -> World:
    return live_through(LONG)


SLOW = pytest.mark.slow
OTHERS = [pytest.param(change, marks=SLOW) for change in CHANGES if change != "less"]


@pytest.mark.parametrize("change", ["less", *OTHERS])
def test_one_private_record_changes_no_byte_that_leaves(change: str, usual: World) -> None:
    assert [said.status for said in usual.said] == [0] * len(QUICK), usual.said
    assert {
        "runs/sup/checkpoints/step-00000002/model.safetensors",
        "runs/auto/report.html",
        "runs/auto/released_scores.json",
        "runs/auto/statement.json",
    } <= usual.files.keys()
    assert differences(usual, live_through(QUICK, change)) == []


def test_no_word_of_a_private_image_leaves(usual: World) -> None:
    check_words(usual)


@SLOW
@pytest.mark.parametrize("change", ["less", "damaged"])
def test_nor_does_any_command(change: str, usual_long: World) -> None:
    """Every command, also those that are refused: for what is asked, not for what the images
    are.
    """
    refused = {said.argv[-1] for said in usual_long.said if said.status == 2}
    assert refused == REFUSED and all(said.status in (0, 2) for said in usual_long.said)
    check_words(usual_long)
    assert differences(usual_long, live_through(LONG, change)) == []


@pytest.fixture(scope="module")
def of_people() -> World:
    return live_through(PEOPLE_QUICK, people=True)


FIRST, *MORE_PEOPLE = PEOPLE_CHANGES


@pytest.mark.parametrize("change", [FIRST, *[pytest.param(c, marks=SLOW) for c in MORE_PEOPLE]])
def test_one_person_changes_no_byte_that_leaves(change: str, of_people: World) -> None:
    assert [said.status for said in of_people.said] == [0] * len(PEOPLE_QUICK), of_people.said
    assert {"runs/auto/statement.json", "runs/auto/released_scores.json"} <= of_people.files.keys()
    check_words(of_people)
    assert differences(of_people, live_through(PEOPLE_QUICK, change, people=True)) == []


@SLOW
@pytest.mark.parametrize("change", list(PEOPLE_CHANGES))
def test_nor_does_a_person_in_any_run(change: str) -> None:
    usual = live_through(PEOPLE_LONG, people=True)
    statuses = [said.status for said in usual.said]
    assert statuses == [0] * (len(PEOPLE_LONG) - 1) + [2], usual.said
    check_words(usual)
    assert differences(usual, live_through(PEOPLE_LONG, change, people=True)) == []


def test_a_study_of_trials_shows_no_private_record() -> None:
    usual = live_through(STUDY_QUICK)
    assert [said.status for said in usual.said] == [0, 0], usual.said
    assert "runs/study/trial-000/statement.json" in usual.files
    check_words(usual)
    assert differences(usual, live_through(STUDY_QUICK, "less")) == []


@SLOW
@pytest.mark.parametrize("people", [False, True])
def test_nor_does_any_study(people: bool) -> None:
    """Simulations have no report, and a selection has no accounting for several images."""
    unit = DRAWN if people else ()
    commands = [(*study, *(unit if study[0] == "tune" else ())) for study in STUDIES]
    usual = live_through(commands, people=people)
    refused = [at for at, said in enumerate(usual.said) if said.status]
    assert refused == ([6, 7, 8] if people else [6]), usual.said
    check_words(usual)
    for change in (FIRST, "one image less") if people else ("less", "damaged"):
        assert differences(usual, live_through(commands, change, people)) == []


def test_the_comparison_sees_a_count_in_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    save, command = Run.save, [(*HEAD, "--head", "one_step", "--name", "one")]

    def leaks(run: Run, tensors: Any, **more: Any) -> Path:
        return save(run, tensors, num_seen=run.store.num_records, **more)

    monkeypatch.setattr(Run, "save", leaks)
    found = differences(live_through(command), live_through(command, "less"))
    assert found == ["runs/one/checkpoints/step-00000001/manifest.json"]


@pytest.mark.parametrize("packed", ["plain", "zip", "gzip", "PNG", "page", "UTF-16"])
def test_the_search_sees_a_word_wherever_it_is_packed(packed: str) -> None:
    word, file = f"a {TOKENS[1].upper()} b" * 20, io.BytesIO()
    if packed == "zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as files:
            files.writestr("x", word)
    if packed in ("PNG", "page"):
        text = PngImagePlugin.PngInfo()
        text.add_itxt("comment", word, zip=True)
        Image.new("L", (1, 1)).save(file, "PNG", pnginfo=text)
    content = {
        "plain": word.encode(),
        "gzip": gzip.compress(word.encode()),
        "UTF-16": word.encode("utf-16-le"),
        "page": b'<img src="data:image/png;base64,' + base64.b64encode(file.getvalue()) + b'">',
    }.get(packed, file.getvalue())
    assert words_in(content)
    assert packed in ("plain", "UTF-16") or TOKENS[1].upper().encode() not in content

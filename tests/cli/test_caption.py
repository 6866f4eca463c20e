"""``dpvision caption``: what people point it at, what it prints and writes, and what it says when
something is wrong.
"""

import csv
import errno
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.checkpoint import save_checkpoint, state_tensors
from dpvision.cli import caption as command
from dpvision.cli import main
from dpvision.config import MAEConfig, PrivacyConfig, RunConfig, ViTConfig, to_dict
from dpvision.data.tokenizer import train_tokenizer
from dpvision.eval.captions.caption_images import Captioned
from dpvision.models import make_model

from ..captioners import (
    VOCAB_SIZE,
    image,
    lineage,
    make_config,
    png,
    train_captioner,
    write_checkpoint,
    write_run,
    write_squares,
)

NUMBERS = (100, 101, 106, 103, 110)
GUARANTEE = {"epsilon": 8.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with a guarantee whose captioner names the colour and the side of a square."""
    return str(
        write_run(
            tmp_path_factory.mktemp("caption") / "run", train_captioner(), guarantee=GUARANTEE
        )
    )


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number in NUMBERS:
        (folder / ("more" if number > 105 else ".") / f"{number}.png").write_bytes(png(number))
    return folder


def _ok(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert main(["caption", *argv]) == 0
    return capsys.readouterr()


def _lines(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def _refused(capsys: pytest.CaptureFixture[str], words: str, *argv: str) -> None:
    assert main(["caption", *argv]) == 2
    err = capsys.readouterr().err
    assert (
        words in err and "Traceback" not in err and "; expected" in err and err.count("\n") <= 2
    ), err


@pytest.mark.slow
def test_the_words_are_those_of_the_image(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Colours by name are right only if channels, normalisation, tokenizer and decoder all are."""
    said = _lines(_ok(capsys, run, str(photos))[0])
    assert said == {f"{photos}/{'more/' if n > 105 else ''}{n}.png": image(n)[1] for n in NUMBERS}


@pytest.mark.slow
def test_a_file_a_folder_a_tar_and_a_store_give_the_same_words(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_squares(tmp_path / "store", NUMBERS)
    with tarfile.open(tmp_path / "some.tar", "w") as tar:
        for number in NUMBERS:
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(png(number))
            tar.addfile(member, io.BytesIO(png(number)))
    files = [str(next(photos.rglob(f"{number}.png"))) for number in NUMBERS]
    wide = tmp_path / "wide.jpg"  # another size, shape and kind of file
    Image.fromarray(image(100, 64)[0]).resize((96, 64)).save(wide, quality=95)
    said = _lines(
        _ok(capsys, run, *files, str(tmp_path / "some.tar"), str(tmp_path / "store"), str(wide))[0]
    )
    assert len(said) == 3 * len(NUMBERS) + 1
    for number, file in zip(NUMBERS, files, strict=True):
        assert said[file] == said[str(number)] == said[f"square-{number}"] == image(number)[1]
    assert said[str(wide)] == image(100)[1]


def test_what_cannot_be_read_is_named_and_counted_and_fails_only_alone(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "more" / "torn.png").write_bytes(png(0)[:60])
    (photos / "notes.txt").write_text("not an image")
    out, err = _ok(capsys, run, str(photos))
    assert len(_lines(out)) == len(NUMBERS)
    assert (
        "2 could not be read" in err
        and "more/torn.png (damaged)" in err
        and "notes.txt (not an image)" in err
    )
    _refused(capsys, "1 could not be read: ", run, str(photos / "notes.txt"))
    found = json.loads(_ok(capsys, run, str(photos), "--json")[0])
    assert len(found["captions"]) == len(NUMBERS) and {
        one["problem"] for one in found["unreadable"]
    } == {"damaged", "not an image"}


def test_nothing_is_read_where_a_place_is_wrong(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(capsys, "nothing there", run, str(photos), str(tmp_path / "nowhere"))
    _refused(capsys, "no images", run)
    (tmp_path / "empty").mkdir()
    _refused(capsys, "no images", run, str(tmp_path / "empty"))


def test_files_hold_what_the_terminal_shows(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _lines(_ok(capsys, run, str(photos))[0])
    many, place = ("--method", "beam", "--num", "3"), tmp_path / "confidential"
    place.mkdir()
    printed = json.loads(_ok(capsys, run, str(photos), *many, "--json")[0])["captions"]
    assert {one["image"]: one["captions"][0]["text"] for one in printed} == shown
    out = _ok(capsys, run, str(photos), *many, "--out", str(place / "c.jsonl"))[0]
    assert "keep the file where the images are kept" in out and shown.popitem()[1] not in out
    assert [json.loads(line) for line in (place / "c.jsonl").read_text().splitlines()] == printed
    _ok(capsys, run, str(photos), *many, "--out", str(place / "c.csv"))
    with (place / "c.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["image"], r["caption"]) for r in rows] == [
        (one["image"], c["text"]) for one in printed for c in one["captions"]
    ]
    for row, said in zip(rows, (c for one in printed for c in one["captions"]), strict=True):
        assert float(row["log_probability"]) == pytest.approx(said["log_probability"], rel=1e-4)
    assert sorted(p.name for p in place.iterdir()) == ["c.csv", "c.jsonl"]  # no partial file stays
    best_first = [[c["log_probability"] for c in one["captions"]] for one in printed]
    assert all(scores == sorted(scores, reverse=True) and len(scores) == 3 for scores in best_first)


def test_a_name_that_is_not_utf_8_does_not_lose_the_captions(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = Path(os.fsdecode(os.fsencode(photos) + b"/caf\xe9.png"))
    odd.write_bytes(png(100))
    escaped, place = f"{photos}/caf\\udce9.png", tmp_path / "confidential"
    assert escaped in _lines(_ok(capsys, run, str(photos))[0])
    place.mkdir()
    _ok(capsys, run, str(photos), "--out", str(place / "c.jsonl"))
    names = [
        json.loads(line)["image"]
        for line in (place / "c.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    _ok(capsys, run, str(photos), "--out", str(place / "c.csv"))
    with (place / "c.csv").open(newline="", encoding="utf-8") as file:
        rows = [row["image"] for row in csv.DictReader(file)]
    assert len(names) == len(rows) == len(NUMBERS) + 1 and str(odd) in names and escaped in rows


@pytest.mark.parametrize(
    ("visibility", "guarantee", "public_store", "expected"),
    [
        ("private", GUARANTEE, True, "public"),
        ("private", GUARANTEE, False, "private"),
        ("private", None, True, "private"),
        ("public", None, True, "public"),
        ("public", None, False, "private"),
    ],
)
def test_captions_are_as_private_as_images_and_weights(
    tmp_path: Path,
    visibility: str,
    guarantee: dict | None,
    public_store: bool,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = write_squares(tmp_path / "store", NUMBERS, public=public_store)
    own = write_run(tmp_path / "run", train_captioner(), visibility=visibility, guarantee=guarantee)
    assert json.loads(_ok(capsys, str(own), str(store.path), "--json")[0])["visibility"] == expected
    command = [str(own), str(store.path), "--out", str(tmp_path / "c.csv")]
    if expected == "private":
        _refused(
            capsys,
            "would hold captions of private images; expected a folder called confidential",
            *command,
        )
        assert not (tmp_path / "c.csv").exists()
        command.append("--release-private-outputs")
    text = _ok(capsys, *command)[0]
    assert ("captions of private images" in text) == (expected == "private")


def test_samples_are_a_images_own(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hot samples of one image: other company, another name and another batch change nothing;
    another seed and another draw do.
    """
    hot = ("--method", "sample", "--temperature", "3", "--num", "4", "--json")

    def samples(*argv: str) -> list[dict]:
        return json.loads(_ok(capsys, run, *argv, *hot)[0])["captions"]

    def texts(one: dict) -> list[str]:
        return [caption["text"] for caption in one["captions"]]

    together = {Path(one["image"]).name: texts(one) for one in samples(str(photos))}
    shutil.copy(photos / "101.png", tmp_path / "renamed.png")
    assert texts(samples(str(tmp_path / "renamed.png"))[0]) == together["101.png"]
    assert {
        Path(one["image"]).name: texts(one) for one in samples(str(photos), "--batch-size", "2")
    } == together
    assert texts(samples(str(tmp_path / "renamed.png"), "--seed", "1")[0]) != together["101.png"]
    assert (
        len({tuple(own) for own in together.values()}) == len(NUMBERS)
        and len(set(together["101.png"])) > 1
    )


def test_a_prompt_begins_every_caption(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in ("greedy", "beam", "sample"):
        said = _lines(
            _ok(capsys, run, str(photos), "--method", method, "--prompt", " A  blue square ")[0]
        )
        assert {text.removesuffix("left").removesuffix("right") for text in said.values()} == {
            "a blue square on the "
        }


def test_averaged_weights_are_others(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ok(capsys, run, str(photos))[0] != _ok(capsys, run, str(photos), "--ema")[0]


def test_a_caption_is_one_line_whatever_is_sampled(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a temperature of a hundred all bytes come up, line ends and escapes among them."""
    out = _ok(
        capsys, run, str(photos), "--method", "sample", "--temperature", "100", "--num", "20"
    )[0]
    assert len(out.split("\n")) == 20 * len(NUMBERS) + 1
    assert all(c.isprintable() or c == "\n" for c in out) and "\N{REPLACEMENT CHARACTER}" in out


def test_wrong_input_gets_one_clear_error(
    run: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(photos)
    for words, argv in [
        ("at most beams=2", ("--method", "beam", "--beams", "2", "--num", "3")),
        ("num=2", ("--num", "2")),
        ("temperature", ("--method", "sample", "--temperature", "nan")),
        ("top_p", ("--top-p", "1.5")),
        ("Shorten it", ("--prompt", "a red square on the left " * 3)),
        ("max_words", ("--max-words", "99")),
        ("batch_size", ("--batch-size", "0")),
        ("workers", ("--workers", "0")),
        ("seed", ("--seed", "-1")),
        (".jsonl or .csv", ("--out", str(tmp_path / "c.txt"))),
        ("existing folder", ("--out", str(tmp_path / "nowhere" / "c.csv"))),
    ]:
        _refused(capsys, words, run, where, *argv)
    _refused(capsys, "none in", str(tmp_path / "photos"), where)
    assert not list(tmp_path.glob("*.csv"))


def test_a_run_of_another_kind_is_named_for_what_it_is(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ViTConfig(image_size=8, patch_size=2, depth=1, width=16, num_heads=2)
    config = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=60, expected_batch_size=20, steps=4, noise_multiplier=2.0
        ),
        model=MAEConfig(encoder=small, decoder_depth=1, decoder_width=16, decoder_num_heads=2),
    )
    manifest = {
        "run_id": "r",
        "ledger_steps": 4,
        "updates": 4,
        "config": to_dict(config),
        "plan": {},
        "ledger_digest": "d",
    }
    save_checkpoint(
        tmp_path / "mae",
        manifest | {"lineage": lineage("public", None)},
        state_tensors(make_model(config.model, 0)),
    )
    _refused(capsys, "'mae'", str(tmp_path / "mae"), str(photos))


def test_a_tokenizer_that_does_not_fit_is_refused(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, history = train_captioner(), lineage("public", None)
    write_checkpoint(tmp_path / "without", model, history=history, tokenizer=None)
    _refused(capsys, "no tokenizer.json", str(tmp_path / "without"), str(photos))
    other = train_tokenizer([image(number)[1] for number in range(64)], VOCAB_SIZE - 2)
    write_checkpoint(tmp_path / "smaller", model, history=history, tokenizer=other)
    _refused(capsys, f"{VOCAB_SIZE - 2} entries", str(tmp_path / "smaller"), str(photos))


def test_a_run_that_has_diverged_says_so(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(make_config().model, 0)
    with torch.no_grad():
        model.encoder.patch_embed.weight.fill_(np.nan)
    run = write_run(tmp_path / "run", model, guarantee=GUARANTEE)  # type: ignore[arg-type]
    _refused(capsys, "diverged", str(run), str(photos))


def test_a_reader_that_stops_early_is_no_error(
    run: str, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `dpvision caption RUN PHOTOS | head -1`."""

    def closed(one: Captioned) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(command, "_print_lines", closed)
    assert _ok(capsys, run, str(photos)) == ("", "")

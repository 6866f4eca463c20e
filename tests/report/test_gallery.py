"""The gallery shows images that nobody chose, with the words that were said of them, on the pages
where they may stand.
"""

import base64
import copy
import html
import io
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    state_tensors,
)
from dpvision.cli import main
from dpvision.config import PrivacyConfig, to_dict
from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_textures
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.eval.captions.cider import cider_d
from dpvision.eval.captions.open_captioner import open_captioner
from dpvision.files import write_json
from dpvision.models.captioner import Captioner
from dpvision.report import gallery as module
from dpvision.report.gallery import (
    OWN,
    Gallery,
    Row,
    gallery_of_run,
    made_of_public_images,
    make_gallery,
)
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import make_report

from ..captioners import (
    image,
    make_config,
    make_tokenizer,
    png,
    train_captioner,
    write_run,
    write_squares,
)
from ..statement.runs import make_run, make_store

GUARANTEE = {"epsilon": 8.0}
VOID = {"meta", "img", "br", "hr", "link", "input"}
NUM = 120


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_squares(tmp_path_factory.mktemp("squares") / "squares", range(200, 200 + NUM))


def stubborn() -> Captioner:
    """A captioner that says "qqqq" of everything; the letter occurs in no other caption and on no
    page.
    """
    model = copy.deepcopy(train_captioner())
    token = make_tokenizer().words("q")[0]
    with torch.no_grad():
        model.word_head.weight.zero_()
        model.word_head.bias.zero_()
        model.word_head.bias[token] = 9.0
    return model


SAID_BY_STUBBORN = "q" * 16


def captioner_run(
    folder: Path, small_privacy: PrivacyConfig, model: Captioner | None = None
) -> Path:
    """A private run that may be reported, whose checkpoint is a captioner's."""
    make_store(folder / "store")
    run = make_run(folder / "run", folder / "store", privacy=small_privacy, charged=2)
    checkpoint = find_checkpoint(run)
    manifest = read_manifest(checkpoint)
    manifest["config"]["model"] = to_dict(make_config().model)
    manifest["config"]["data"] |= {
        name: value
        for name, value in to_dict(make_config().data).items()
        if name in ("mean", "std")
    }
    files = {"tokenizer.json": make_tokenizer().to_bytes()}
    save_checkpoint(checkpoint, manifest, state_tensors(model or train_captioner()), files=files)
    write_json(run / "config.json", manifest["config"])
    return run


def pixels(row: Row) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(row.image.split(",")[1]))))


def numbers(rows: tuple[Row, ...]) -> list[int]:
    """Which images of ``captioners.image`` the rows show."""
    known = {image(number)[0].tobytes(): number for number in range(200, 200 + NUM)}
    return [known[pixels(row).tobytes()] for row in rows]


@pytest.mark.slow
def test_images_stand_with_their_own_words(tmp_path: Path, squares: Store) -> None:
    made = gallery_of_run(
        write_run(tmp_path / "run", train_captioner(), guarantee=GUARANTEE), squares.path, count=6
    )
    assert made.num_candidates == NUM and len(made.random) == len(made.best) == 6
    for row, number in zip(
        (*made.random, *made.best), numbers((*made.random, *made.best)), strict=True
    ):
        caption = image(number)[1]
        assert row.people == (caption, "there is " + caption) and [s.text for s in row.said] == [
            caption
        ]


def test_the_random_ones_are_drawn_by_id_whatever_is_said_of_them_and_wherever_they_stand(
    tmp_path: Path, squares: Store
) -> None:
    run, other = (
        write_run(tmp_path / "run", train_captioner()),
        write_run(tmp_path / "other", stubborn()),
    )
    drawn = numbers(gallery_of_run(run, squares.path).random)
    assert drawn == numbers(gallery_of_run(other, squares.path).random)
    assert drawn != sorted(drawn) and len(set(drawn)) == 8
    ids = squares.index["id"]
    assert drawn != [200 + int(row) for row in np.argsort(ids)[:8]], (
        "a hash of a hash: ids alone could be sorted by anybody's wish"
    )


@pytest.mark.slow
def test_the_best_are_of_the_tenth_with_the_highest_cider(tmp_path: Path, squares: Store) -> None:
    """Of a captioner that is trained too little to be always right; the scores are made again here
    from what it says.
    """
    half = train_captioner(40)
    made = gallery_of_run(write_run(tmp_path / "run", half), squares.path, count=30)
    every = gallery_of_run(tmp_path / "run", squares.path, count=NUM).random
    scores = cider_d([row.said[0].text for row in every], [row.people for row in every])
    assert [row.said[0].cider for row in every] == pytest.approx(scores.tolist())
    assert made.means[OWN] == pytest.approx(scores.mean())
    assert len(made.best) == NUM // 10
    shown = sorted((row.said[0].cider for row in made.best), reverse=True)
    assert shown == pytest.approx(sorted(scores, reverse=True)[: NUM // 10])
    assert scores.std() > 0.1  # else any choice would do


def test_a_captioner_that_sees_is_far_above_its_own_words_about_other_images(
    tmp_path: Path, squares: Store
) -> None:
    made = gallery_of_run(
        write_run(tmp_path / "run", train_captioner()),
        squares.path,
        [write_run(tmp_path / "mute", stubborn())],
    )
    assert made.means[OWN] > 3 * made.chance and made.means["mute"] == 0
    assert all(
        [s.name for s in row.said] == [OWN, "mute"] and row.said[1].text == SAID_BY_STUBBORN
        for row in made.random
    )


def test_another_score_chooses_other_best_ones(tmp_path: Path, squares: Store) -> None:
    ready = open_captioner(write_run(tmp_path / "run", train_captioner()))
    wanted = "a blue square on the left"
    liked = make_gallery(
        {OWN: ready},
        squares,
        set(),
        score=lambda said, _: np.array([float(text == wanted) for text in said]),
    )
    assert {s.text for row in liked.best for s in row.said} == {wanted}


@pytest.mark.parametrize(
    ("public_store", "other", "operator_sees", "report_sees"),
    [
        (True, None, {OWN}, {OWN}),
        (True, ("public", None), {OWN, "other"}, {OWN, "other"}),
        (True, ("private", None), {OWN, "other"}, {OWN}),
        (True, ("private", GUARANTEE), {OWN, "other"}, {OWN}),
        (False, None, {OWN}, None),
        (False, ("public", None), {OWN, "other"}, None),
    ],
)
def test_what_private_images_shaped_stays_on_the_operators_page(
    tmp_path: Path,
    small_privacy: PrivacyConfig,
    public_store: bool,
    other: tuple | None,
    operator_sees: set,
    report_sees: set | None,
) -> None:
    store = write_squares(tmp_path / "shown", range(300, 324), public=public_store)
    run = captioner_run(tmp_path, small_privacy)
    beside = (
        []
        if other is None
        else [write_run(tmp_path / "other", stubborn(), visibility=other[0], guarantee=other[1])]
    )
    made = gallery_of_run(run, store.path, beside, count=3)
    part = made.public_part()
    pages = {
        "operator": make_operator_page(run, gallery=made),
        "report": make_report(run, gallery=part),
    }
    assert pages["operator"].parent.name == "confidential"
    for name, sees in (("operator", operator_sees), ("report", report_sees)):
        page = html.unescape(pages[name].read_text())
        assert ("square on the" in page) == ('src="data:image/png' in page) == (sees is not None)
        assert (SAID_BY_STUBBORN in page) == ("other" in (sees or ()))
        assert page.count("<dt>other ") == (
            6 - 1 if "other" in (sees or ()) else 0
        )  # three at random, and two best of 24


def test_a_report_takes_nothing_but_the_public_part(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    run = captioner_run(tmp_path, small_privacy)
    private = gallery_of_run(run, write_squares(tmp_path / "private", range(20), public=False).path)
    with pytest.raises(PrivacyError, match="is private"):
        make_report(run, gallery=private)
    public = write_squares(tmp_path / "public", range(20)).path
    mixed = gallery_of_run(run, public, [write_run(tmp_path / "tainted", stubborn())])
    with pytest.raises(PrivacyError, match="is private"):
        make_report(run, gallery=mixed)
    assert not (run / "report.html").exists() and not (run / "statement.json").exists()


def test_a_run_without_a_guarantee_has_words_for_nobody_else(
    tmp_path: Path, squares: Store
) -> None:
    made = gallery_of_run(write_run(tmp_path / "run", train_captioner()), squares.path)
    assert made.visibility == "private" and made.public_part() is None


def test_the_part_is_a_whole_page_with_words_for_each_image_and_no_foreign_marks(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    samples = [
        Sample(f"k{n}", png(n), {"caption": f'<script>alert({n})</script> & "so" on\nand on'})
        for n in range(400, 430)
    ]
    store = import_samples(samples, tmp_path / "shown", public=True)
    run = captioner_run(tmp_path, small_privacy)
    made = gallery_of_run(run, store.path, count=4)
    for page in (make_report(run, gallery=made), make_operator_page(run, gallery=made)):
        text = page.read_text()
        assert "<script" not in text and html.escape("<script>alert(") in text
        checker = _Checker()
        checker.feed(text)
        assert checker.open == [] and checker.images == checker.described == 7


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images = self.described = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images += 1
            self.described += len(dict(attrs).get("alt") or "") > 30
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.getpos())


def test_no_more_images_are_captioned_than_are_asked_for(
    tmp_path: Path, squares: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", train_captioner())
    whole = gallery_of_run(run, squares.path)
    monkeypatch.setattr(module, "NUM_CANDIDATES", 10)
    made = gallery_of_run(run, squares.path)
    assert (
        made.num_candidates == 10
        and len(made.best) == 1
        and numbers(made.random) == numbers(whole.random)
    )


def test_images_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    store = write_squares(tmp_path / "store", range(500, 520))
    shard = store.shard_paths[0]
    data = bytearray(shard.read_bytes())
    offset = int(store.index["offset"][4])
    data[offset : offset + 40] = b"x" * 40
    shard.write_bytes(data)
    made = gallery_of_run(write_run(tmp_path / "run", train_captioner()), store.path, count=20)
    assert made.num_candidates == len(made.random) == 19


def test_large_images_are_made_small(tmp_path: Path) -> None:
    samples = []
    for number in range(600, 603):
        file = io.BytesIO()
        Image.fromarray(image(number, 600)[0]).resize((900, 600)).save(file, "JPEG")
        samples.append(Sample(f"k{number}", file.getvalue(), {"caption": image(number)[1]}))
    store = import_samples(samples, tmp_path / "store", public=True)
    made = gallery_of_run(write_run(tmp_path / "run", train_captioner()), store.path)
    assert {pixels(row).shape for row in made.random} == {(149, 224, 3)}
    assert all(row.image.startswith("data:image/jpeg;base64,") for row in made.random)


def test_wrong_input_gets_one_clear_error(
    tmp_path: Path, small_privacy: PrivacyConfig, squares: Store
) -> None:
    run = captioner_run(tmp_path, small_privacy)
    write_textures(tmp_path / "textures", 4, 16)
    with pytest.raises(DataError, match="0 images with captions"):
        gallery_of_run(run, tmp_path / "textures")
    with pytest.raises(ConfigError, match="given twice"):
        gallery_of_run(run, squares.path, [run])
    make_store(tmp_path / "mae" / "store")
    with pytest.raises(ConfigError, match="'mae'"):
        gallery_of_run(
            make_run(
                tmp_path / "mae" / "run",
                tmp_path / "mae" / "store",
                privacy=small_privacy,
                charged=2,
            ),
            squares.path,
        )


@pytest.mark.slow
def test_the_command_says_where_the_gallery_stands(
    tmp_path: Path, small_privacy: PrivacyConfig, squares: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(captioner_run(tmp_path, small_privacy))
    other = str(write_run(tmp_path / "other", stubborn()))
    assert (
        main(
            ["report", run, "--gallery", str(squares.path), "--beside", other, "--gallery-num", "2"]
        )
        == 0
    )
    assert "gallery    on both pages; other on the operator's only" in capsys.readouterr().out
    page = (Path(run) / "report.html").read_text()
    assert "CIDEr-D on public images is above" in page and "No score on public" not in page
    private = str(write_squares(tmp_path / "private", range(20), public=False).path)
    assert main(["report", run, "--gallery", private]) == 0
    assert (
        "operator's page only" in capsys.readouterr().out
        and "square on the" not in (page := (Path(run) / "report.html").read_text())
        and "No score on public images was measured." in page
    )
    assert main(["report", run, "--gallery", private, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"statement", "report", "operator"}
    for argv, words in [
        (["--beside", other], "--gallery"),
        (["--gallery", private, "--gallery-num", "0"], "gallery_num"),
    ]:
        assert main(["report", run, *argv]) == 2
        assert words in capsys.readouterr().err


def test_all_of_a_public_gallery_is_its_public_part(tmp_path: Path, squares: Store) -> None:
    made = gallery_of_run(
        write_run(tmp_path / "run", train_captioner(), visibility="public"), squares.path
    )
    assert isinstance(made, Gallery) and made.public_part() is made


def test_a_public_store_does_not_wash_a_parent_without_a_guarantee(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    make_store(tmp_path / "store", "public")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=small_privacy, charged=2)
    assert made_of_public_images(run)
    folder = find_checkpoint(run)
    manifest = read_manifest(folder)
    manifest["lineage"].insert(
        0, {"store_id": "f00d", "visibility": "private", "run_id": "b", "guarantee": None}
    )
    save_checkpoint(folder, manifest, load_checkpoint(folder).model)
    assert not made_of_public_images(run)


def test_a_start_whose_lineage_is_not_written_yet_is_not_taken_for_public(
    tmp_path: Path, small_privacy: PrivacyConfig
) -> None:
    make_store(tmp_path / "store", "public")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=small_privacy, charged=2)
    shutil.rmtree(run / "checkpoints")
    assert made_of_public_images(run)
    config = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", config | {"init_from": "somewhere"})
    assert not made_of_public_images(run)

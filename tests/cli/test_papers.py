"""The papers' files on the command line: one run of each command that takes them, and what it says
when something is wrong.
"""

import json
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import scene_captions

from ..captioners import png
from ..encoders import paper_files as files

pytestmark = pytest.mark.usefixtures("gates_once")

DECLARED = ["--public-weights", "ViP-Syn; CC-BY-NC 4.0; the authors' page"]
SIZES = [
    *("--model.encoder.image-size", "16", "--model.encoder.patch-size", "4"),
    *("--model.encoder.depth", "1", "--model.encoder.width", "16"),
    *("--model.encoder.num-heads", "2", "--model.encoder.mlp-ratio", "2"),
]
STEPS = [
    *("--privacy.dataset-size", "60", "--privacy.expected-batch-size", "20"),
    *("--privacy.steps", "2", "--optim.warmup-steps", "1"),
    *("--privacy.allow-weak-guarantee", "--hardware.physical-batch-size", "16"),
    *("--hardware.workers", "1"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both files, a vocabulary, a private and a public store of scenes, an image."""
    root = tmp_path_factory.mktemp("papers")
    files.write(root / "vip.pth", files.mae_file(width=16, depth=1, grid=4))
    files.write(root / "encoder.pth", files.mae_file(width=192, depth=1, grid=4, decoder=None))
    dpcap = files.dpcap_file(width=16, depth=1, decoder_depth=1, grid=4, vocab_size=200)
    files.write(root / "dpcap.pth", dpcap)
    words = sorted({word for caption in scene_captions(50) for word in caption.split()})
    files.write_vocabulary(root / "vocab.txt", words, 200)
    write_scenes(root / "mine", 60, 16, workers=1, public=False)
    write_scenes(root / "public", 120, 16, workers=1, first=500)
    write_scenes(root / "test", 12, 16, workers=1, first=900)
    (root / "photo.png").write_bytes(png(1))
    return root


def _said(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main([*argv]) == status
    out, err = capsys.readouterr()
    assert status or not err or "error" not in err, err
    return out if status == 0 else err


def test_vips_file_starts_a_private_run_and_is_declared(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["train", "vip.micro", "--data", str(place / "mine"), *SIZES, *STEPS, "--json"]
    argv += ["--model.decoder-width", "16", "--model.decoder-num-heads", "2"]
    argv += ["--model.target", "pixels", "--init-from", f"vip:{place / 'vip.pth'}@heads=2,2"]
    assert "--public-weights" in _said(capsys, *argv, status=2)
    assert json.loads(_said(capsys, *argv, *DECLARED))["complete"]
    report = _said(capsys, "report", "runs/vip.micro")
    statement = Path("runs/vip.micro/statement.json").read_text()
    assert "CC-BY-NC 4.0" in statement and "the authors' page" in statement and report
    assert str(place) not in statement


def test_an_encoder_is_scored_with_its_published_heads(place, capsys):
    found = _said(
        capsys,
        *("evaluate", f"vip:{place / 'encoder.pth'}@nano", "--train", str(place / "public")),
        *("--test", str(place / "test")),
        *(
            "--protocols",
            "knn,few_shot_dpcap",
            "--shots",
            "2",
            "--against",
            "none",
            "--workers",
            "1",
            "--json",
        ),
    )
    assert {score["name"] for score in json.loads(found)["scores"]} == {"vip:encoder.pth"}


def test_dpcaps_file_captions_is_scored_and_starts_a_private_run(
    place, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    spec = f"dpcap:{place / 'dpcap.pth'}@heads=2,4@{place / 'vocab.txt'}"
    line = _said(capsys, "caption", spec, str(place / "photo.png"))
    assert line.startswith(str(place / "photo.png")) or "photo.png: " in line
    scores = json.loads(
        _said(
            capsys,
            *("evaluate", "captioner", spec, "--scenes", "12", "--against", "random"),
            *("--store", str(place / "test"), "--captions", "--workers", "1", "--json"),
        )
    )["scores"]
    assert {score["name"] for score in scores} == {"dpcap:dpcap.pth", "random weights"}
    assert len(scores) > 2
    argv = ["train", "dpcap.micro", "--data", str(place / "mine"), *SIZES, *STEPS, "--json"]
    argv += ["--model.decoder.depth", "1", "--model.decoder.width", "16", *DECLARED]
    argv += ["--model.vocab-size", "200", "--init-from", spec]
    argv += ["--data.tokenizer", str(place / "vocab.txt")]
    assert json.loads(_said(capsys, *argv))["complete"]
    line = _said(capsys, "caption", "runs/dpcap.micro", str(place / "photo.png"))
    assert "photo.png: " in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["caption", "dpcap:{}/dpcap.pth@heads=2,4", "{}/photo.png"], "@vocab.txt, with vocab.txt"),
        (["caption", "dpcap:{}/none.pth", "{}/photo.png"], "none.pth (No such file"),
        (["caption", "dpcap:{}/vip.pth", "{}/photo.png"], "SimVLM.weight=nothing"),
        (["evaluate", "captioner", "dpcap:{}/vip.pth", "--scenes", "2"], "SimVLM.weight=nothing"),
        (
            ["caption", "dpcap:{}/dpcap.pth@heads=2,4@{}/vocab.txt", "{}/photo.png", "--ema"],
            "Drop --ema",
        ),
        (
            ["train", "vip.base", "--data", "{}/mine", "--init-from", "vip:{}/none.pth"],
            "none.pth (No such file",
        ),
        (
            ["train", "vip.nano", "--data", "{}/mine", "--init-from", "vip:{}/encoder.pth@base"],
            "width=192; expected 768 of vip:FILE@base",
        ),
        (["embed", "vip:{}/vip.pth", "{}/public", "{}/out.npz"], "@heads=N"),
    ],
)
def test_wrong_files_end_with_one_line_and_status_2(place, argv, words, capsys):
    said = _said(capsys, *(part.replace("{}", str(place)) for part in argv), status=2)
    assert words in said and "Traceback" not in said


@pytest.mark.parametrize(
    "task", [pytest.param("detection", marks=pytest.mark.slow), "segmentation"]
)
def test_a_papers_encoder_gets_a_detector_or_a_segmenter(place, task, tmp_path, capsys):
    if task == "detection":
        from ..eval.dense import test_detection_command as command
        from ..eval.dense.coco_shapes import write_shapes as write_objects

        data = []
        for part, num in (("train", 4), ("test", 3)):
            file, folder = write_objects(tmp_path / part, num, seed=num)
            data += [f"--{part}", str(file), f"--{part}-images", str(folder)]
    else:
        from ..eval.dense import test_segmentation_command as command
        from ..eval.dense.semantic_shapes import write_shapes

        data = ["--ignore-ids", "0", "255"]
        for part, first in (("train", 0), ("test", 50)):
            folder = write_shapes(tmp_path / part, 4, first=first)
            data += [f"--{part}", str(folder / "images"), f"--{part}-masks", str(folder / "masks")]
        data += ["--classes", str(folder / "classes.json")]
    spec = f"vip:{place / 'encoder.pth'}@nano"
    found = json.loads(
        _said(capsys, "evaluate", task, spec, *data, *command.SMALL, "--public", "--json")
    )
    assert found["scores"] and {score["n"] for score in found["scores"]} <= {3, 4}


def test_a_head_on_a_papers_encoder_is_declared(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["adapt", "--data", str(place / "mine"), "--encoder", f"vip:{place / 'encoder.pth'}"]
    argv += ["--num-classes", "8", "--dataset-size", "60", "--epsilon", "4", "--name", "a"]
    argv += ["--head", "prototypes", "--hardware.workers", "1", "--json"]
    assert "--public-weights" in _said(capsys, *argv, status=2)
    assert json.loads(_said(capsys, *argv, *DECLARED))["complete"]
    settings = Path("runs/a/encoder.json").read_text()
    assert "vip:encoder.pth" in settings and str(place) not in settings

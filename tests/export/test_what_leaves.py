"""Nothing but weights, names and public figures leaves: files are listed and searched; the lineage
comes back with the weights.
"""

import hashlib
import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors import safe_open

from dpvision.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from dpvision.cli import main
from dpvision.data.transform import LibraryData, LibraryResize
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.open import open_encoder
from dpvision.encoders.starting_weights import open_parent
from dpvision.errors import ConfigError, DPVisionError, PrivacyError
from dpvision.export.card import _code
from dpvision.export.write import Format, export
from dpvision.privacy.plan import make_plan
from dpvision.runs.lineage import inherit, own_entry
from dpvision.statement.statement import make_statement
from dpvision.weights import read_lineage

from ..adapt.runs_of_heads import write_digits
from ..statement.runs import PRIVACY, make_run, make_store
from .models_to_export import (
    CLASSES,
    MODELS,
    NUM_DECLARED,
    NUM_RECORDS,
    Copies,
    Made,
    make_exportable,
)

MAE, VIT, CAPTIONER = (
    "masked autoencoder (`vip.*`)",
    "classifier on our ViT, class token",
    "captioner (`dpcap.*`)",
)
TIMM, LORA = "classifier on a timm model", "LoRA on a timm model"
FILES = {
    (MAE, "timm"): {"config.json", "model.safetensors"},
    (MAE, "transformers"): {"config.json", "model.safetensors", "preprocessor_config.json"},
    (VIT, "transformers"): {"config.json", "model.safetensors", "preprocessor_config.json"},
    (VIT, "onnx"): {"model.onnx"},
    (VIT, "safetensors"): {"config.json", "model.safetensors", "modelling.py"},
    (CAPTIONER, "safetensors"): {
        "config.json",
        "model.safetensors",
        "modelling.py",
        "tokenizer.json",
    },
    (LORA, "peft"): {"adapter_config.json", "adapter_model.safetensors"},
}
"""Model and format -> the files beside README.md and statement.json."""


def metadata(path: Path) -> dict[str, str]:
    if path.suffix == ".onnx":
        import onnx

        return {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.mark.parametrize(("name", "to"), FILES, ids=lambda x: x)
def test_no_file_names_a_path_a_ledger_or_a_private_number(
    name: str, to: Format, made: Made, copied: Copies, tmp_path: Path
) -> None:
    run = made(name)
    folder = copied(name, to, tmp_path / "out").folder
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")}
    assert files.keys() == FILES[name, to] | {"README.md", "statement.json"}
    store = run.parent / "store"
    ledger = (run / "ledger.jsonl").read_text().splitlines()
    secrets = {
        "a path": [str(run), str(tmp_path), str(Path(__file__).parents[2]), "site-packages"],
        "the store's place": [str(store)],
        "a line of the ledger": ledger,
        "a figure of confidential/": ["grad_norm_m", "clip_fraction", "images_per_s"],
    }
    for file, content in files.items():
        for what, words in secrets.items():
            for word in words:
                assert word.encode() not in content, (file, what, word)
    # the ledger's digest is in the statement, as in the run's own, and nowhere else
    digest = json.loads(files["statement.json"])["hashes"]["ledger"].encode()
    assert [file for file, content in files.items() if digest in content] == ["statement.json"]


def test_the_number_of_private_records_does_not_leave(
    made: Made, copied: Copies, tmp_path: Path
) -> None:
    """The run's store has another number than the declared one, which is public."""
    name = "head on a masked autoencoder, any scale"
    run = made(name)
    (store,) = run.parent.glob(f"{run.name}-digits/store.json")
    count, declared = str(NUM_RECORDS), str(NUM_DECLARED)
    assert json.loads(store.read_text())["num_records"] == NUM_RECORDS
    folder = copied(name, "timm", tmp_path / "out").folder
    texts = [p.read_text() for p in folder.iterdir() if p.suffix in (".json", ".md")]
    texts.append(json.dumps(metadata(folder / "model.safetensors")))
    assert not any(re.search(rf"\b{count}\b", text) for text in texts)
    assert any(re.search(rf"\b{declared}\b", text) for text in texts)


@pytest.mark.parametrize(("name", "to"), FILES, ids=lambda x: x)
def test_metadata_bind_lineage_statement_and_preprocessing(
    name: str, to: Format, made: Made, copied: Copies, tmp_path: Path
) -> None:
    run = made(name)
    folder = copied(name, to, tmp_path / "out").folder
    manifest, statement = load_checkpoint(run).manifest, folder / "statement.json"
    stated = json.loads(statement.read_bytes())
    assert stated == make_statement(run)
    weights = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".onnx")]
    assert weights
    for path in weights:
        about = metadata(path)
        said = json.loads(about["dpvision.statement"])
        assert said["sha256"] == hashlib.sha256(statement.read_bytes()).hexdigest()
        assert said["headline"] == stated["headline"]
        assert json.loads(about["dpvision.mean"]) == list(manifest["config"]["data"]["mean"])
        size = MODELS[name].encoder.image_size  # type: ignore[union-attr]
        assert json.loads(about["dpvision.image_size"]) == size
        assert json.loads(about["dpvision.crop"]) == "centre", "of use, not of training"
        assert json.loads(about.get("dpvision.class_names", "null")) == (
            CLASSES if name in (VIT, LORA) else None
        )
        if path.suffix == ".onnx":
            found = json.loads(about["dpvision.lineage"])["lineage"]
        else:
            found = read_lineage(path) or []
        assert found == manifest["lineage"]


def test_an_exported_private_model_that_comes_back_counts_its_first_epsilon(
    made: Made, copied: Copies, tmp_path: Path
) -> None:
    """As an encoder and as initial weights, by timm's name and the file: the second run's total is
    that of both, from the plan in the file.
    """
    run, name = made(TIMM), "timm:vit_tiny_patch16_224"
    file = copied(TIMM, "timm", tmp_path / "out").folder / "model.safetensors"
    lineage = load_checkpoint(run).manifest["lineage"]
    assert list(open_parent(f"timm:test_vit@{_test_vit(tmp_path, lineage)}").manifest["lineage"])
    from dpvision.encoders.weights_file import open_weights

    carried = open_weights(file, {"visibility": "undeclared"}).lineage
    assert list(carried) == lineage, name
    store = write_digits(tmp_path / "digits", 0, 40)
    entry = {**lineage[0], "store_id": store.store_id}
    plan = make_plan(replace(PRIVACY, dataset_size=40, expected_batch_size=40))
    alone = own_entry(plan, store, "b" * 16, plan.steps)["guarantee"]["total"]["epsilon"]
    both = own_entry(plan, store, "b" * 16, plan.steps, inherit([entry], store, plan))
    assert both["guarantee"]["total"]["epsilon"] > 1.2 * alone


def test_an_export_saved_again_by_transformers_is_not_declared_public(
    made: Made, copied: Copies, tmp_path: Path
) -> None:
    """Its lineage was lost and its config.json still had the statement: declared public, the first
    run's epsilon was not counted.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is of an extra")
    first, again = copied(VIT, "transformers", tmp_path / "out").folder, tmp_path / "again"
    transformers.AutoModelForImageClassification.from_pretrained(first).save_pretrained(again)
    (again / "preprocessor_config.json").write_bytes(
        (first / "preprocessor_config.json").read_bytes()
    )
    store, plan = write_digits(tmp_path / "digits", 0, 4), make_plan(PRIVACY)
    encoder = open_encoder(f"hf:{again}")
    for declared in (None, "ViT; MIT; a model hub"):
        with pytest.raises(PrivacyError, match=r"again carries no lineage.*dpvision exported it"):
            inherit(encoder.lineage, store, plan, declaration=declared)
    lineage = list(open_encoder(f"hf:{first}").lineage)
    assert lineage == load_checkpoint(made(VIT)).manifest["lineage"]


def _test_vit(folder: Path, lineage: list[dict[str, Any]]) -> Path:
    """A whole exported timm model under its own name, as ``timm:NAME@FILE`` opens it."""
    from dpvision.config import TimmConfig
    from dpvision.models import make_model

    from .models_to_export import classifier

    cfg = classifier(encoder=TimmConfig(name="test_vit", image_size=160), pooling="own")
    make_store(folder / "store")
    run = make_run(
        folder / "test_vit",
        folder / "store",
        model=cfg,
        tensors=make_model(cfg, 0).state_dict(),
    )
    out = export(run, "timm", folder / "test_vit-timm").folder / "model.safetensors"
    encoder = open_encoder(f"timm:test_vit@{out}")
    assert list(encoder.lineage) == load_checkpoint(run).manifest["lineage"]
    return out


@pytest.mark.parametrize(
    ("name", "to", "pipeline"),
    [
        (MAE, "safetensors", "image-feature-extraction"),
        (VIT, "timm", "image-classification"),
        (CAPTIONER, "safetensors", "image-to-text"),
    ],
)
def test_the_model_card_is_read_by_the_hub_and_repeats_the_statement(
    name: str, to: Format, pipeline: str, made: Made, copied: Copies, tmp_path: Path
) -> None:
    folder = copied(name, to, tmp_path / "out").folder
    card, statement = ModelCard.load(folder / "README.md"), make_statement(made(name))
    assert card.data.license == "other" and card.data.pipeline_tag == pipeline
    assert card.data.tags == ["dpvision", "differential-privacy"]
    for sentence in (
        statement["headline"],
        *statement["in_words"],
        statement["history"]["other_runs"]["text"],
        statement["scope"]["trust_model"],
        *statement["scope"]["not_covered"],
        *(entry["text"] for entry in statement["history"]["lineage"]),
    ):
        assert sentence in card.text
    assert all(f"{k}. `{name}`" in card.text for k, name in enumerate(CLASSES)) == (name == VIT)


def test_the_code_of_a_card_runs_in_the_folder(
    copied: Copies, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For safetensors in a new process that cannot import dpvision. A command that needs a run
    names that code.
    """
    import subprocess
    import sys

    from PIL import Image

    folder = copied(VIT, "safetensors", tmp_path / "out").folder
    Image.new("RGB", (50, 40), "orange").save(folder / "photo.png")
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    blocked = "import sys\nsys.modules['dpvision'] = None\nfrom PIL import Image\n"
    rest = "image = Image.open('photo.png')\n" + code + "print(probability_BK.sum().item())\n"
    done = subprocess.run(
        [sys.executable, "-c", blocked + rest],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1, abs=1e-5)
    assert main(["predict", str(folder), str(folder / "photo.png")]) == 2
    assert "loaded by the code in its README.md" in capsys.readouterr().err


@pytest.mark.parametrize("name", [MAE, pytest.param(VIT, marks=pytest.mark.slow)])
def test_an_export_to_transformers_opens_as_an_encoder(
    name: str, made: Made, copied: Copies, tmp_path: Path
) -> None:
    folder = copied(name, "transformers", tmp_path / "out").folder
    theirs, ours = open_encoder(f"hf:{folder}"), open_encoder(made(name))
    x_BCHW = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    for pooling, x_BD in ours.poolings(x_BCHW).items():
        assert (theirs.poolings(x_BCHW)[pooling] - x_BD).abs().max() < 1e-5, pooling
    assert list(theirs.lineage) == load_checkpoint(made(name)).manifest["lineage"]
    assert (theirs.mean, theirs.std) == (ours.mean, ours.std)
    square = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).numpy()
    assert abs(theirs.preprocess(square) - ours.preprocess(square)).max() < 1e-5


def tainted(root: Path) -> Path:
    """A run on private images without a guarantee."""
    return make_exportable(
        root / "tainted",
        MAE,
        privacy=replace(PRIVACY, guarantee="none", noise_multiplier=0.0, max_grad_norm=None),
    )


def test_confidential_weights_leave_into_a_confidential_folder_only(tmp_path: Path) -> None:
    run = tainted(tmp_path)
    with pytest.raises(ConfigError, match=r"weights trained on private images without a guarantee"):
        export(run, "timm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = export(run, "timm", tmp_path / "confidential" / "out")
    card = (done.folder / "README.md").read_text()
    assert done.headline is None and "**This run guarantees nothing.**" in card
    assert "differential-privacy" not in card and "statement.json" not in done.files
    assert json.loads(metadata(done.folder / "model.safetensors")["dpvision.statement"]) is None
    found = read_lineage(done.folder / "model.safetensors")
    assert found is not None and found[-1]["guarantee"] is None
    assert found[-1]["visibility"] == "private"


def test_a_run_whose_checkpoint_was_written_by_the_clock_is_refused(
    made: Made, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(made(MAE).parent, tmp_path / "copy")
    run = tmp_path / "copy" / made(MAE).name
    shutil.move(run / "checkpoints", run / "confidential" / "checkpoints")
    with pytest.raises(PrivacyError, match="written by the clock"):
        export(run, "timm", tmp_path / "out")


def test_optimizer_state_and_averaged_weights_stay(made: Made, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(made(MAE).parent, tmp_path / "copy")
    run = tmp_path / "copy" / made(MAE).name
    checkpoint = load_checkpoint(run)
    marked = {name: torch.full((64,), 0.123456) for name in checkpoint.model}
    manifest = {k: v for k, v in checkpoint.manifest.items() if k not in ("tensors", "format")}
    folder = find_checkpoint(run)
    average = {name: value + 1 for name, value in checkpoint.model.items()}
    save_checkpoint(folder, manifest, checkpoint.model, ema=average, optimizer=marked)
    out = export(run, "safetensors", tmp_path / "out").folder
    bytes_of_one = torch.full((64,), 0.123456).numpy().tobytes()
    assert not any(bytes_of_one in p.read_bytes() for p in out.iterdir())
    other = export(run, "safetensors", tmp_path / "averaged", ema=True)
    assert (other.folder / "model.safetensors").read_bytes() != (
        out / "model.safetensors"
    ).read_bytes()
    assert open_encoder(run, ema=True) is not None


def test_errors_name_what_to_do_and_leave_nothing(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    cut = make_exportable(tmp_path / "cut", MAE)
    weights = find_checkpoint(cut) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    bare = make_exportable(tmp_path / "bare", VIT)
    for path in sorted(bare.glob("checkpoints/*/*")):
        path.unlink()
    vip = str(made(MAE))
    for argv, said in (
        ([vip, str(taken), "--to", "timm"], "is not empty; expected a new folder"),
        ([vip, str(tmp_path / "x"), "--to", "peft"], "no low-rank additions"),
        ([vip, str(tmp_path / "x"), "--to", "timm", "--ema"], "no averaged weights"),
        ([vip, str(tmp_path / "x"), "--to", "timm", "--encoder", "hog"], "which is not a head"),
        ([str(cut), str(tmp_path / "x"), "--to", "timm"], "model.safetensors"),
        ([str(bare), str(tmp_path / "x"), "--to", "timm"], "expected a run folder or a checkpoint"),
        ([str(tmp_path), str(tmp_path / "x"), "--to", "timm"], "holds no run"),
        (["nothing", str(tmp_path / "x"), "--to", "timm"], "no such folder"),
    ):
        assert main(["export", *argv]) == 2, argv
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
        assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".*partial*"))
    assert [p.name for p in taken.iterdir()] == ["mine.txt"]
    assert main(["export", vip, "--to", "timm", str(tmp_path / "empty")]) == 0
    assert "timm.create_model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("to", "name", "missing", "extra"),
    [
        ("onnx", MAE, "onnxruntime", "onnx"),
        ("peft", LORA, "peft", "loops"),
        ("transformers", MAE, "transformers", "hf"),
    ],
)
def test_a_missing_extra_is_named(
    to: Format,
    name: str,
    missing: str,
    extra: str,
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"pip install 'dpvision\[{extra}\]'"):
        export(made(name), to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_no_folder(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    run = made(MAE)
    monkeypatch.setattr(Path, "write_bytes", refuses)
    with pytest.raises(DPVisionError, match="expected a writable disk with space"):
        export(run, "timm", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_names_of_classes_are_written_as_they_are(copied: Copies, tmp_path: Path) -> None:
    folder = copied(VIT, "timm", tmp_path / "out").folder
    assert json.loads((folder / "config.json").read_text())["label_names"] == CLASSES


@pytest.mark.parametrize("name", [VIT, "classifier on a timm convnet"])
def test_timm_names_no_licence_or_tag_of_other_weights(
    name: str, copied: Copies, tmp_path: Path
) -> None:
    """Weights of private images alone had the licence and tag of timm's for the architecture."""
    folder = copied(name, "timm", tmp_path / "out").folder
    found = timm.create_model(f"local-dir:{folder}", pretrained=True).pretrained_cfg
    fields = ("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes")
    assert not any(found.get(field) for field in fields), found
    written = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    assert not set(fields) & set(written)


@pytest.mark.parametrize("name", ["<script>x</script>", "1. a_b_*c*", "- [x](y)", "`a``b`", "`"])
def test_a_name_of_a_class_is_no_markup_in_the_card(name: str) -> None:
    shown = MarkdownIt().render(f"0. {_code(name)}\n1. b")
    assert f"<li><code>{escape(name)}</code></li>" in shown


def test_a_head_on_images_that_transformers_resizes_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formats with a file of preprocessing of their own would give other pixels."""
    run = made("classifier on our ViT, mean")
    classifier = load_classifier(run)
    classifier.data = LibraryData(library=LibraryResize(32, True))
    monkeypatch.setattr("dpvision.export.product.load_classifier", lambda *a, **k: classifier)
    with pytest.raises(
        ConfigError, match=r"how images are resized, are transformers.*Use --to onnx"
    ):
        export(run, "safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()

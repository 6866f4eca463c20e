"""Features standardised by public images: mean and spread are those of the public images alone,
what predicts is what was trained, and a store that is not public, or shares images, is refused
before anything is charged.
"""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.adapt import public_statistics as statistics_module
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.prepare import prepare
from dpvision.adapt.public_statistics import public_statistics, require_apart, rows_used
from dpvision.adapt.session import adapt, feature_stream, new_head_session, resumed_head_session
from dpvision.checkpoint import load_checkpoint
from dpvision.cli import main
from dpvision.config import RunConfig, with_settings
from dpvision.data.loader import image_batches
from dpvision.data.open import open_store
from dpvision.data.overlap import write_without
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.fixed import fixed_encoder
from dpvision.errors import ConfigError, DataError, DPVisionError, PrivacyError
from dpvision.export.product import _linear
from dpvision.models.layers import LinearHead
from dpvision.statement.statement import make_statement
from dpvision.statement.verify import verify_statement
from dpvision.tune import Question, plan_study

from ..eval.labelled import write_store
from .runs_of_heads import head_config, run_head

pytest.importorskip("imagehash", reason="imagehash is of an extra")
SIDE, NUM = 32, 120


def noise(seed: int, num: int = NUM, contrast: float = 1.0) -> list[np.ndarray]:
    """Different images of noise, uint8 (SIDE, SIDE, 3)."""
    rng = np.random.default_rng(seed)
    return list((128 + contrast * (rng.random((num, SIDE, SIDE, 3)) * 255 - 128)).astype(np.uint8))


def write(path: Path, images: list[np.ndarray], *, public: bool) -> Store:
    return write_store(path, images, [str(i % 10) for i in range(len(images))], public=public)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write(
        tmp_path_factory.mktemp("stores") / "private", noise(0, contrast=0.5), public=False
    )


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write(tmp_path_factory.mktemp("stores") / "public", noise(1), public=True)


def config_of(private: Store, public: Path, head: str = "many_steps") -> RunConfig:
    return with_settings(head_config(private, head), {"model.public_store": str(public)})


def pixels(store: Store) -> np.ndarray:
    """Features of the encoder "pixels" at 8 px, by the loader alone, float64 (N, D)."""
    data = fixed_encoder("pixels", 8).data
    found = [
        x.flatten(1) for x, *_ in image_batches(store, None, 8, data, batch_size=50, workers=1)
    ]
    return torch.cat(found).double().numpy()


def test_the_head_has_mean_and_spread_of_the_public_images(
    private: Store, public: Store, tmp_path: Path
) -> None:
    root = run_head(config_of(private, public.path), tmp_path / "run")
    saved, x_ND = load_checkpoint(root).model, pixels(public)
    variance_D = x_ND.var(axis=0)
    assert np.allclose(saved["centre"], x_ND.mean(axis=0), atol=1e-6)
    assert np.allclose(saved["spread"], np.sqrt(variance_D + 0.1 * variance_D.mean()), atol=1e-6)
    assert not np.allclose(x_ND.mean(axis=0), pixels(private).mean(axis=0), atol=0.01)


def test_no_bit_of_them_depends_on_the_private_images(public: Store, tmp_path: Path) -> None:
    """Neither on one more or fewer, nor on all of them."""
    found = []
    for name, images in {"a": noise(2), "fewer": noise(2)[:-1], "others": noise(3)}.items():
        store = write(tmp_path / name, images, public=False)
        made = load_checkpoint(run_head(config_of(store, public.path), tmp_path / f"run-{name}"))
        found.append((made.model["centre"], made.model["spread"]))
    for centre_D, spread_D in found[1:]:
        assert torch.equal(centre_D, found[0][0]) and torch.equal(spread_D, found[0][1])


@pytest.mark.parametrize("unit", [True, False])
def test_what_predicts_standardises_as_in_training(
    private: Store, public: Store, tmp_path: Path, unit: bool
) -> None:
    config = with_settings(config_of(private, public.path), {"model.unit": unit})
    root = run_head(config, tmp_path / "run")
    classifier, stream = load_classifier(root), feature_stream(prepare(config))
    rows_BE = next(iter(stream.blocks())).x_BE
    x_ND = torch.from_numpy(pixels(private)).float()
    head = classifier.head
    assert isinstance(head, LinearHead) and head.spread is not None
    z_ND = (x_ND - head.centre) / head.spread
    if unit:
        z_ND = z_ND / z_ND.norm(dim=1, keepdim=True)
    assert torch.allclose(rows_BE, z_ND, atol=1e-5), "what is trained on"
    expected_NK = z_ND @ head.weight.T + head.bias
    assert torch.allclose(head(x_ND), expected_NK, atol=1e-4), "what predicts"
    if not unit:
        assert torch.allclose(_linear(head)(x_ND), expected_NK, atol=1e-3), "what is exported"


def test_a_stream_and_its_head_agree_after_the_division() -> None:
    rng = np.random.default_rng(0)
    x_ND = rng.normal(3, 2, (50, 6)).astype(np.float32)
    centre_D, spread_D = torch.full((6,), 3.0), torch.tensor([0.5, 1, 2, 4, 8, 16.0])
    stream = FeatureStream(
        x_ND,
        np.zeros(50, dtype=np.int64),
        2,
        centre_D=centre_D,
        spread_D=spread_D,
        unit=True,
        constant=0.1,
    )
    weight_KE, bias_K = torch.randn(2, 7), torch.randn(2)
    theirs = next(iter(stream.blocks())).x_BE @ weight_KE.T + bias_K
    ours = stream.head(weight_KE, bias_K).scores(torch.from_numpy(x_ND))
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_feature_that_overflows_in_the_division_leaves_out_its_record_only() -> None:
    x_ND = np.ones((3, 4), dtype=np.float32)
    x_ND[1, 2] = 1e38
    spread_D = torch.full((4,), 1e-6)
    stream = FeatureStream(x_ND, np.zeros(3, dtype=np.int64), 2, spread_D=spread_D, unit=True)
    block = next(iter(stream.blocks()))
    assert block.row_B.tolist() == [0, 2] and block.x_BE.isfinite().all()


def recompressed(image: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=80)
    return np.asarray(Image.open(file).convert("RGB"))


def smooth(seed: int) -> np.ndarray:
    """An image that JPEG leaves alike."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def refused(config: RunConfig, root: Path, error: type[DPVisionError], match: str) -> None:
    """The run is refused, at a start and nothing is left that an earlier run would leave."""
    with pytest.raises(error, match=match), new_head_session(config, root):
        pass
    assert not root.exists()
    assert config.data.store is not None
    ledgers = Path(config.data.store).parent / "LEDGERS"
    assert not list(ledgers.glob("*/*.jsonl")), "nothing was charged"


@pytest.mark.parametrize(
    "twin",
    [
        pytest.param(lambda image: image, id="same pixels"),
        pytest.param(recompressed, id="recompressed"),
        pytest.param(lambda image: image[:, ::-1].copy(), id="mirrored"),
    ],
)
def test_one_image_in_both_stores_refuses_the_run(twin, tmp_path: Path) -> None:
    private = write(tmp_path / "mine" / "s", [*noise(4), smooth(0)], public=False)
    clean = write(tmp_path / "clean", [*noise(5), smooth(1)], public=True)
    shared = write(tmp_path / "shared", [*noise(5), twin(smooth(0))], public=True)
    config = config_of(private, shared.path)
    why = (
        r"operator only: 1 of its images are among those of .* dpvision data overlap .* Pass other"
    )
    refused(config, tmp_path / "run", DataError, why)
    run_head(config_of(private, clean.path), tmp_path / "run")


def test_a_store_that_is_not_public_or_was_cleared_or_is_of_the_same_import_is_refused(
    private: Store, public: Store, tmp_path: Path
) -> None:
    mine = write(tmp_path / "mine" / "s", noise(6), public=False)
    root = tmp_path / "run"
    other = write(tmp_path / "other", noise(7), public=False)
    why = r"is private; expected public images.*--public"
    refused(config_of(mine, other.path), root, PrivacyError, why)
    cleared = public.path.parent / "cleared"
    write_without(public, cleared, np.arange(3), private, ["identical bytes"])
    refused(config_of(mine, cleared), root, PrivacyError, "was cleared of private images")
    whole = write(tmp_path / "halves" / "whole", noise(8, 240), public=True)
    one, two = split_store(whole.path, whole.path.parent / "a", whole.path.parent / "b", 0.5)
    refused(config_of(one, two.path), root, PrivacyError, "are of one import")


def test_too_few_alike_or_unreadable_images_are_refused(private: Store, tmp_path: Path) -> None:
    few = write(tmp_path / "few", noise(9, 99), public=True)
    with pytest.raises(DataError, match=r"holds 99 images; expected 100 photographs or more"):
        prepare(config_of(private, few.path))
    broken = write(tmp_path / "broken", noise(10, 100), public=True)
    with open(broken.shard_paths[0], "r+b") as shard:
        shard.seek(int(broken.index["offset"][7]))
        shard.write(b"\0" * int(broken.index["size"][7]))
    encoder, settings = fixed_encoder("pixels", 8), {"batch_size": 50, "workers": 1}
    device = torch.device("cpu")
    with pytest.raises(DataError, match=r"99 of 100 images have features.*expected 100 or more"):
        public_statistics(encoder, "pixels", 192, broken, device=device, **settings)
    constant = replace(encoder, poolings=lambda x: {"pixels": torch.ones(len(x), 192)})
    alike = write(tmp_path / "alike", noise(11), public=True)
    with pytest.raises(DataError, match=r"120 of 120 images have features, of mean variance 0;"):
        public_statistics(constant, "pixels", 192, alike, device=device, **settings)


def test_standardised_rows_take_no_public_store(private: Store, public: Store) -> None:
    settings = {"model.encoder.spec": "patches", "model.encoder.image_size": 32}
    config = with_settings(config_of(private, public.path), settings)
    with pytest.raises(ConfigError, match="standardised already; expected another encoder"):
        prepare(config)


def test_of_many_public_images_as_many_as_needed_take_part_at_equal_distances(
    public: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_used(public).tolist() == list(range(NUM))
    monkeypatch.setattr(statistics_module, "MOST_IMAGES", 50)
    rows = rows_used(public)
    assert len(rows) == 50 and rows[0] == 0 and set(np.diff(rows)) == {2, 3}


def test_all_public_images_are_compared_also_those_that_take_no_part(
    private: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_module, "MOST_IMAGES", 50)
    images = noise(12)
    images[1] = noise(0, contrast=0.5)[7]
    shared = write(tmp_path / "s", images, public=True)
    assert 1 not in rows_used(shared)
    with pytest.raises(DataError, match="operator only: 1 of its images"):
        require_apart(shared, private)


def test_shards_that_are_replaced_after_a_comparison_are_compared_again(
    private: Store, tmp_path: Path
) -> None:
    """Their sizes and headers the same; what is kept of the comparison before would pass them."""
    public = write(tmp_path / "s", noise(13), public=True)
    require_apart(public, private)
    shard, row = public.shard_paths[0], 3
    where, size = int(public.index["offset"][row]), int(public.index["size"][row])
    twin = private.read(7)
    assert len(twin) <= size, "padded with zeros, which a PNG may end with"
    with open(shard, "r+b") as file:
        file.seek(where)
        file.write(twin.ljust(size, b"\0"))
    with pytest.raises(DataError, match="operator only: 1 of its images"):
        require_apart(open_store(public.path), private)


def test_a_study_compares_before_its_first_trial(private: Store, tmp_path: Path) -> None:
    shared = write(tmp_path / "s", [*noise(14), noise(0, contrast=0.5)[7]], public=True)
    root = tmp_path / "study"
    test = write(tmp_path / "test", noise(15), public=True)
    space = ("optim.learning_rate=1,2",)
    asked = Question(how="charged", space=space, trials=2, budget=40.0, test=test.path)
    with pytest.raises(DataError, match="operator only: 1 of its images"):
        plan_study(asked, config_of(private, shared.path), root)
    assert not root.exists()


def test_lineage_and_statement_name_the_store_and_what_the_comparison_tells(
    private: Store, public: Store, tmp_path: Path
) -> None:
    root = run_head(config_of(private, public.path), tmp_path / "run")
    lineage = load_checkpoint(root).manifest["lineage"]
    entry = next(entry for entry in lineage if entry["store_id"] == public.store_id)
    assert entry["visibility"] == "public" and entry["guarantee"] is None
    assert entry["deduplicated"]["against"] == [private.store_id]
    statement = make_statement(root, store_dir=private.path)
    told = json.dumps(statement)
    assert "Mean and spread of features of public store" in told
    assert any(
        text.startswith("That no image of a public store")
        for text in statement["scope"]["not_covered"]
    )
    assert "divided by their spread" in " ".join(statement["history"]["preprocessing"])
    (root / "statement.json").write_text(told)
    for file in root.rglob("*"):
        if file.is_file() and "confidential" not in file.relative_to(root).parts:
            assert str(public.path).encode() not in file.read_bytes(), file
    found = verify_statement(root / "statement.json", root, private.path)
    assert "failed" not in {check.status for check in found}, found


def test_a_resumed_run_compares_again_and_has_the_same_numbers(
    private: Store, public: Store, tmp_path: Path
) -> None:
    """An image that came into the public store meanwhile is found."""
    own = tmp_path / "public"
    shutil.copytree(public.path, own)
    config = config_of(private, own)
    with new_head_session(config, tmp_path / "run"):
        pass  # stopped before the first release
    with resumed_head_session(tmp_path / "run") as session:
        adapt(session)
    saved = load_checkpoint(tmp_path / "run").model
    assert np.allclose(saved["centre"], pixels(public).mean(axis=0), atol=1e-6)
    with new_head_session(config, tmp_path / "other"):
        pass
    shutil.rmtree(own)
    write(own, [*noise(1), noise(0, contrast=0.5)[5]], public=True)
    with (
        pytest.raises(DataError, match="operator only: 1 of its images"),
        resumed_head_session(tmp_path / "other"),
    ):
        pass


def test_the_command_refuses_in_a_dry_run_too_and_for_networks(
    private: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = write(tmp_path / "s", [*noise(16), noise(0, contrast=0.5)[7]], public=True)
    asked = f"adapt --data {private.path} --num-classes 10 --dataset-size {NUM} --epsilon 4"
    asked += f" --public-store {shared.path} --runs {tmp_path / 'runs'}"
    assert main([*asked.split(), "--encoder", "hog", "--dry-run"]) == 2
    assert "operator only: 1 of its images" in capsys.readouterr().err
    network = asked.replace("adapt", "adapt transfer.micro_lora", 1)
    assert main(network.split()) == 2
    error = capsys.readouterr().err
    assert "--public-store" in error and "trains a network; expected a head" in error
    assert not (tmp_path / "runs").exists()

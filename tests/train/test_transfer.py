"""Transfer runs: weights of a timm file or of a run, every way of tuning through the loop, what
they refuse, and that they load again.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from made import secrets
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import checkpoint_filter_fn

import dpvision
from dpvision.checkpoint import load_checkpoint
from dpvision.config import ClassifierConfig, DataConfig, OptimConfig, RunConfig, TimmConfig
from dpvision.config.resolve import resolve
from dpvision.encoders.open import open_encoder
from dpvision.encoders.starting_weights import adapted, open_parent
from dpvision.encoders.trained import run_encoder
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models import make_model
from dpvision.models.tuned import merged
from dpvision.recipes import RECIPES
from dpvision.train import loop
from dpvision.train.loop import fit
from dpvision.train.start import check_run, new_session, resumed_session

pytestmark = pytest.mark.usefixtures("gates_once")

NAME = "test_vit"  # timm's own for tests: 160 px, patches of 16, 6 blocks of width 64


def constants(name: str) -> dict[str, tuple[float, ...]]:
    known = timm.get_pretrained_cfg(name)
    return {"mean": tuple(known.mean), "std": tuple(known.std)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a timm model with a classifier of its own, every number drawn anew."""
    model = timm.create_model(NAME, pretrained=False, num_classes=7)
    generator = torch.Generator().manual_seed(4)
    file = tmp_path_factory.mktemp("timm") / "weights.safetensors"
    save_file(
        {
            name: 0.05 * torch.randn(p.shape, generator=generator)
            for name, p in model.state_dict().items()
        },
        file,
    )
    return file


@pytest.fixture
def transfer(config: RunConfig, weights: Path) -> RunConfig:
    """A private run on 60 scenes, from the file."""
    return replace(
        config,
        model=ClassifierConfig(
            encoder=TimmConfig(name=NAME, image_size=32), num_classes=8, tuned="head", pooling="own"
        ),
        data=replace(config.data, **constants(NAME)),
        optim=OptimConfig(
            name="sgd", learning_rate=0.1, momentum=0.0, weight_decay=0.0, schedule="constant"
        ),
        init_from=f"timm:{NAME}@{weights}",
        public_weights="Test ViT; CC0; drawn by this test",
    )


def train(config: RunConfig, root: Path) -> Path:
    with new_session(config, root, open_parent) as session:
        assert fit(session, secrets=secrets(), quiet=True)
    return root


def test_a_run_starts_from_timms_weights_with_positions_interpolated_by_timm(
    transfer: RunConfig, weights: Path, tmp_path: Path
) -> None:
    theirs = timm.create_model(NAME, pretrained=False, num_classes=0, img_size=32)
    theirs.load_state_dict(
        checkpoint_filter_fn(load_file(weights), theirs), strict=False
    )  # resamples the positions
    with new_session(transfer, tmp_path / "run", open_parent) as session:
        model = session.model.eval()
        assert model.encoder.model.pos_embed.shape == (1, 5, 64)
        x = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(model.features(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)
        assert not model.head.weight.any() and session.lineage == [
            {
                "store_id": f"weights:timm:{NAME}@weights.safetensors",
                "visibility": "public",
                "licence": "CC0",
                "run_id": None,
                "guarantee": None,
                "declared": {"by": "operator", "name": "Test ViT", "source": "drawn by this test"},
            }
        ]
        assert str(weights) not in str(session.lineage), "no path of this machine"


@pytest.mark.parametrize("way", ["head", "lora", "film", "biases", "last_blocks"])
def test_a_tuned_run_leaves_the_frozen_weights_as_they_were_and_loads_again(
    transfer: RunConfig, tmp_path: Path, way: str
) -> None:
    config = resolve(
        transfer,
        {"model.tuned": way, "optim.learning_rate": 1.0}
        | ({"model.lora_rank": 2} if way == "lora" else {}),
    )
    with new_session(config, tmp_path / "run", open_parent) as session:
        before = {name: p.detach().clone() for name, p in session.model.named_parameters()}
        moved = {name for name, p in session.model.named_parameters() if p.requires_grad}
        assert fit(session, secrets=secrets(), quiet=True)
        for name, p in session.model.named_parameters():
            assert torch.equal(p, before[name]) == (name not in moved), name
        model = session.model.eval()
    encoder = dpvision.load(tmp_path / "run")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), model.encoder.places(x).mean(1))
    assert encoder.image_size == 32 and encoder.preprocess.mean == config.data.mean
    opened = run_encoder(tmp_path / "run")
    assert opened.family == "transformer" and set(opened.poolings(x)) == {"mean", "2x2"}
    lineage = load_checkpoint(tmp_path / "run").manifest["lineage"]
    assert [entry["guarantee"] is None for entry in lineage] == [True, False] and lineage[0][
        "visibility"
    ] == "public"


@pytest.mark.parametrize("way", ["whole", "last_blocks", "lora", "film", "biases"])
def test_statistics_of_batch_norm_are_the_files_to_the_end_and_needed_at_the_start(
    transfer: RunConfig, tmp_path: Path, way: str
) -> None:
    """In training, in both sets of weights, and where the file counts no batches. What was trained
    is then timm's network with the merged weights.
    """
    torch.manual_seed(0)
    given = timm.create_model("test_efficientnet", num_classes=7).state_dict()
    for name, value in given.items():
        if name.endswith(("running_mean", "running_var")):
            value.uniform_(0.5, 1.5)
    file = tmp_path / "weights.safetensors"
    save_file({n: v for n, v in given.items() if not n.endswith("num_batches_tracked")}, file)
    encoder = TimmConfig(name="test_efficientnet", image_size=32)
    rank = {"lora_rank": 2, "lora_on": "both", "lora_scale": 0.5} if way == "lora" else {}
    config = replace(
        transfer,
        model=replace(transfer.model, encoder=encoder, tuned=way, **rank),
        data=replace(transfer.data, **constants("test_efficientnet")),
        optim=replace(transfer.optim, learning_rate=0.1, average=True),
        init_from=f"timm:test_efficientnet@{file}",
        hardware=replace(transfer.hardware, physical_batch_size=16),
    )
    with pytest.raises(ConfigError, match=r"init_from=None with BatchNorm .*--init-from timm:NAME"):
        check_run(replace(config, init_from=None, public_weights=None), open_parent)
    root = train(config, tmp_path / "run")
    checkpoint, theirs = load_checkpoint(root), timm.create_model("test_efficientnet")
    norms = {n for n, m in theirs.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    ones = {n for n, m in theirs.named_modules() if getattr(m, "kernel_size", 0) == (1, 1)}
    trainable = {n for n, _ in theirs.named_parameters() if not n.startswith("classifier")}
    last = {n for n in trainable if n.startswith(("blocks.4", "conv_head", "bn2"))}
    expected = {
        "whole": trainable,
        "last_blocks": last,
        "film": {n for n in trainable if n.rpartition(".")[0] in norms},
        "biases": {n for n in trainable if n.endswith(".bias")},
        "lora": {f"{n}.weight" for n in ones if n.startswith("blocks")},
    }
    for tensors in (checkpoint.model, checkpoint.ema):
        plain = merged(tensors, 0.5)
        moved = {
            n for n, v in given.items() if not torch.equal(plain.get(f"encoder.model.{n}", v), v)
        }
        assert moved == expected[way]
    theirs = timm.create_model("test_efficientnet", num_classes=0)
    plain = merged(checkpoint.model, 0.5)
    theirs.load_state_dict(
        {n.removeprefix("encoder.model."): v for n, v in plain.items() if "model." in n}
    )
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        feature_BD = theirs.eval().forward_features(x).mean((2, 3))
        torch.testing.assert_close(dpvision.load(root)(x), feature_BD, rtol=1e-4, atol=1e-5)
        score_BK = theirs(x) @ plain["head.weight"].T + plain["head.bias"]
        found = dpvision.load_classifier(root).probabilities(x)
    torch.testing.assert_close(found, score_BK.softmax(1), rtol=1e-4, atol=1e-5)


def test_a_resumed_run_without_a_checkpoint_finds_its_start_again(
    transfer: RunConfig, tmp_path: Path
) -> None:
    """Stopped by a crash before the first checkpoint: charged steps stay charged, the weights come
    from the file once more.
    """
    with new_session(transfer, tmp_path / "run", open_parent) as session:
        start = {name: p.clone() for name, p in session.model.state_dict().items()}
        session.run.ledger.append()
    with pytest.raises(CheckpointError, match=r"timm:"), resumed_session(tmp_path / "run"):
        pass
    with resumed_session(tmp_path / "run", None, open_parent) as session:
        assert all(torch.equal(p, start[name]) for name, p in session.model.state_dict().items())
        assert (
            session.run.ledger.steps == 1
            and fit(session, secrets=secrets(), quiet=True)
            and session.updates == 3
        )


def test_the_mean_of_the_iterates_is_kept_and_goes_on_after_a_stop(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    real = loop.update_average

    def watching(average, model, optim, updates):
        seen.append(model.head.weight.detach().clone())
        return real(average, model, optim, updates)

    monkeypatch.setattr(loop, "update_average", watching)
    config = replace(
        config,
        model=ClassifierConfig(encoder=config.model.encoder, num_classes=8),
        optim=OptimConfig(
            name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, average=True
        ),
    )
    stopped = [False]
    append = dpvision.privacy.ledger.Ledger.append

    def crash(self) -> int:
        if self.steps == 2 and not stopped[0]:
            stopped[0] = True
            raise KeyboardInterrupt
        return append(self)

    monkeypatch.setattr(dpvision.privacy.ledger.Ledger, "append", crash)
    with pytest.raises(KeyboardInterrupt), new_session(config, tmp_path / "run") as session:
        session.config = replace(config, hardware=replace(config.hardware, checkpoint_every_s=0.0))
        fit(session, secrets=secrets(), quiet=True)
    with resumed_session(tmp_path / "run") as session:
        assert session.updates == 2 and fit(session, secrets=secrets(), quiet=True)
    checkpoint = load_checkpoint(tmp_path / "run")
    assert len(seen) == 4 and checkpoint.ema is not None
    torch.testing.assert_close(checkpoint.ema["head.weight"], torch.stack(seen).mean(0))
    assert not torch.equal(checkpoint.ema["head.weight"], checkpoint.model["head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lora", "film", "head"])
def test_a_tuned_run_is_a_parent_like_any_other(
    transfer: RunConfig, tmp_path: Path, way: str
) -> None:
    """Its additions are merged: the new run starts as the same function, whatever it tunes
    itself.
    """
    config = replace(
        transfer,
        model=replace(transfer.model, tuned=way, lora_rank=2, lora_scale=0.5),
        optim=replace(transfer.optim, learning_rate=1.0),
    )
    config = resolve(config, {})
    parent = train(config, tmp_path / "one")
    before = dpvision.load(parent)
    x = torch.randn(2, 3, 32, 32)
    for again in ("whole", "lora"):
        child = replace(
            config,
            model=replace(config.model, tuned=again, lora_rank=3),
            init_from=str(parent),
            public_weights=None,
        )
        child = resolve(child, {})
        with new_session(child, tmp_path / f"two-{again}") as session, torch.no_grad():
            torch.testing.assert_close(
                session.model.eval().encoder.places(x).mean(1), before(x), rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                session.model.head.weight, load_checkpoint(parent).model["head.weight"]
            )


@pytest.mark.parametrize(
    ("init_from", "error", "words"),
    [
        (
            "timm:test_vit",
            CheckpointError,
            r"no weights in .*Nothing is downloaded.*timm:test_vit@FILE",
        ),
        ("timm:no_such_model", ConfigError, "expected one of timm's models"),
        (
            "timm:test_vit.no_such_tag@{file}",
            ConfigError,
            "no_such_tag.*Drop the part after the dot",
        ),
        ("timm:vit_tiny_patch16_224@{file}", CheckpointError, r"pos_embed|cls_token|patch_embed"),
        ("timm:test_vit@nowhere.safetensors", CheckpointError, "nowhere.safetensors"),
        ("timm:resnet18@{file}", CheckpointError, "no tensor 'conv1.weight'"),
    ],
)
def test_weights_that_are_not_there_or_do_not_fit_are_refused(
    weights: Path,
    init_from: str,
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(error, match=words):
        open_parent(init_from.format(file=weights))


def test_other_constants_another_model_or_an_unopened_name_are_refused_before_a_charge(
    transfer: RunConfig, tmp_path: Path
) -> None:
    right = transfer
    assert check_run(right, open_parent)[2] == 60
    with pytest.raises(
        ConfigError, match=r"data: mean=.*with which .* was trained. Pass --data.mean"
    ):
        check_run(replace(right, data=replace(right.data, mean=(0.1, 0.2, 0.3))), open_parent)
    other = replace(
        right, model=replace(right.model, encoder=TimmConfig(name="test_vit2", image_size=64))
    )
    with pytest.raises(CheckpointError, match=r"encoder\.name='test_vit'; expected 'test_vit2'"):
        check_run(other, open_parent)
    with pytest.raises(CheckpointError, match="init_from='timm:"):
        check_run(right)


def test_a_recipe_is_put_on_another_encoder_with_the_constants_of_its_images(
    weights: Path, config: RunConfig, tmp_path: Path
) -> None:
    made = adapted(RECIPES["transfer.vit_b16_last"](), f"timm:{NAME}@{weights}")
    assert (
        made.model.encoder == TimmConfig(name=NAME, image_size=384)
        and made.data.mean == constants(NAME)["mean"]
    )
    assert made.model.tuned == "head" and made.init_from == f"timm:{NAME}@{weights}"
    parent = train(config, tmp_path / "mae")
    ours = adapted(RECIPES["transfer.vit_b16_last"](), str(parent))
    assert (
        ours.model.encoder == config.model.encoder
        and ours.model.pooling == "mean"
        and ours.data.mean == DataConfig().mean
    )
    with pytest.raises(ConfigError, match=r"model\.kind='mae'; expected 'classifier'"):
        adapted(config, str(parent))


def test_what_is_trained_starts_from_what_open_encoder_gives(weights: Path) -> None:
    """The weights that a head on frozen features sees are those that a run starts from."""
    frozen = open_encoder(f"timm:{NAME}@{weights}")
    parent = open_parent(f"timm:{NAME}@{weights}")
    model = make_model(
        ClassifierConfig(encoder=TimmConfig(name=NAME, image_size=160), num_classes=3), 0
    )
    model.load_state_dict(parent.model, strict=False)
    x = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval().features(x), frozen.poolings(x)["mean"], rtol=1e-4, atol=1e-5
        )

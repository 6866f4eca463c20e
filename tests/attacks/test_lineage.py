"""Attacks on lineage: weights that private images shaped, brought back through a file, a name or an
edited manifest.

What each gained before is in docs/attacks.md. The tainted weights are those of a run without a
guarantee on the private store that the attacked command works on; only such attacks as need no
change of a number are answered (docs/threat_model.md).
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from made import secrets
from safetensors.torch import load_file, save_file

from dpvision.adapt.prepare import prepare
from dpvision.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from dpvision.cli import main
from dpvision.cli.train import plan_text
from dpvision.config import (
    ClassifierConfig,
    DataConfig,
    FrozenEncoderConfig,
    HardwareConfig,
    HeadConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    TimmConfig,
)
from dpvision.config.resolve import with_head
from dpvision.data.open import open_store
from dpvision.data.synthetic_store import write_scenes
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.open import open_encoder, recognised
from dpvision.encoders.starting_weights import open_parent
from dpvision.errors import CheckpointError, ConfigError, PrivacyError
from dpvision.eval.dense.training_state import FILE, open_checkpoint
from dpvision.privacy.composition import total_epsilon
from dpvision.privacy.printed import up
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.recipes import transfer_heads
from dpvision.runs.lineage import own_entry, runs_on
from dpvision.statement.statement import make_statement
from dpvision.train.loop import fit
from dpvision.train.start import check_run, new_session, resumed_session
from dpvision.weights import contents

pytestmark = pytest.mark.usefixtures("gates_once")

NAME = "test_vit"  # timm's own for tests: 160 px, 6 blocks of width 64
DECLARED = "Test ViT; CC0; drawn at random by this test"
NUM = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private and a public store, a run without a guarantee on the first, and a private run on
    it.
    """
    folder = tmp_path_factory.mktemp("lineage")
    write_scenes(folder / "private", NUM, 16, workers=1, public=False)
    write_scenes(folder / "public", NUM, 16, workers=1, public=True, first=1000)
    train(config_of(folder / "private", guarantee="none"), folder / "nonprivate")
    train(config_of(folder / "private", target_epsilon=8.0, max_grad_norm=0.5), folder / "parent")
    return folder


def config_of(store: Path, init_from: str | None = None, **privacy: object) -> RunConfig:
    known = timm.get_pretrained_cfg(NAME)
    return RunConfig(
        recipe="transfer.vit_b16_last",
        privacy=PrivacyConfig(
            dataset_size=NUM, expected_batch_size=NUM, steps=1, sampling="full_batch", **privacy
        ),
        model=ClassifierConfig(
            encoder=TimmConfig(name=NAME, image_size=160), num_classes=8, pooling="own"
        ),
        data=DataConfig(store=str(store), mean=tuple(known.mean), std=tuple(known.std)),
        optim=OptimConfig(learning_rate=1e-2, ema_decay=0.9),
        hardware=HardwareConfig(device="cpu", physical_batch_size=NUM // 3, workers=1),
        init_from=init_from,
    )


def private_config(root: Path, init_from: str | None, **changes: object) -> RunConfig:
    return replace(
        config_of(root / "private", init_from, target_epsilon=1.0, max_grad_norm=0.5), **changes
    )


def train(config: RunConfig, to: Path) -> Path:
    with new_session(config, to, open_parent) as session:
        assert fit(session, secrets=secrets(), quiet=True)
    return to


def head_on(root: Path, spec: str, public_weights: str | None = None) -> RunConfig:
    config = transfer_heads.auto()
    config = replace(
        config,
        privacy=replace(
            config.privacy, dataset_size=NUM, expected_batch_size=NUM, target_epsilon=4.0
        ),
        model=HeadConfig(encoder=FrozenEncoderConfig(spec=spec), num_classes=8),
        data=replace(config.data, store=str(root / "private")),
        hardware=replace(config.hardware, device="cpu", workers=1),
        public_weights=public_weights,
    )
    return with_head(config, "prototypes")


def weights_of(run: Path, name: str = "model.safetensors") -> Path:
    return find_checkpoint(run) / name


def copied(file: Path, to: Path, name: str = "downloaded.safetensors") -> Path:
    to.mkdir(exist_ok=True)
    return Path(shutil.copyfile(file, to / name))


def saved_again(file: Path, to: Path) -> Path:
    """What another program writes: the same tensors, other names, no metadata."""
    path = to / "exported.safetensors"
    save_file(
        {
            f"backbone.{name.removeprefix('encoder.model.')}": value
            for name, value in load_file(file).items()
        },
        path,
    )
    return path


def pickled(file: Path, to: Path) -> Path:
    torch.save(load_file(file), to / "exported.pth")
    return to / "exported.pth"


LAUNDRIES: dict[str, Callable[[Path, Path], Path]] = {
    "in the run": lambda run, to: weights_of(run),
    "averaged": lambda run, to: weights_of(run, "ema.safetensors"),
    "copied and renamed": lambda run, to: copied(weights_of(run), to),
    "a link to it": lambda run, to: _linked(weights_of(run), to),
    "copied into the run": lambda run, to: copied(
        saved_again(weights_of(run), to), run / "confidential"
    ),
}
RESAVED: dict[str, Callable[[Path, Path], Path]] = {
    "saved again": lambda run, to: saved_again(weights_of(run), to),
    "averaged, saved again": lambda run, to: saved_again(weights_of(run, "ema.safetensors"), to),
    "pickled": lambda run, to: pickled(weights_of(run), to),
}


def _linked(file: Path, to: Path) -> Path:
    (to / "link.safetensors").symlink_to(file)
    return to / "link.safetensors"


@pytest.mark.parametrize("how", [*LAUNDRIES, *RESAVED])
def test_weights_of_a_run_without_a_guarantee_are_refused_through_a_file(
    root: Path, tmp_path: Path, how: str
) -> None:
    """``train --init-from`` and ``adapt --encoder`` took the file as public weights, also where the
    operator declares it public.
    """
    file = (LAUNDRIES | RESAVED)[how](root / "nonprivate", tmp_path)
    spec = f"timm:{NAME}@{file}"
    declaration = DECLARED if how in RESAVED else None
    with pytest.raises(PrivacyError, match="without a guarantee"):
        check_run(private_config(root, spec, public_weights=declaration), open_parent)
    with pytest.raises(PrivacyError, match="without a guarantee"):
        prepare(head_on(root, spec, declaration))
    if declaration is None:  # a declaration does not overrule what the file carries
        with pytest.raises(ConfigError, match="carry their own lineage"):
            check_run(private_config(root, spec, public_weights=DECLARED), open_parent)


@pytest.mark.parametrize("how", LAUNDRIES)
def test_what_is_computed_with_such_weights_is_confidential(
    root: Path, tmp_path: Path, how: str
) -> None:
    file = LAUNDRIES[how](root / "nonprivate", tmp_path)
    assert open_encoder(f"timm:{NAME}@{file}").confidential


@pytest.mark.parametrize("how", [*LAUNDRIES, "saved again"])
def test_evaluate_writes_no_score_of_such_weights_outside_confidential(
    root: Path, tmp_path: Path, how: str
) -> None:
    """Saved again, weights are recognised beside the private store, where the public one of the
    evaluation is in the same folder.
    """
    file = (LAUNDRIES | RESAVED)[how](root / "nonprivate", tmp_path)
    argv = [
        "evaluate",
        f"timm:{NAME}@{file}",
        "--train",
        str(root / "public"),
        "--out",
        str(tmp_path / "scores.json"),
    ]
    assert main(argv) == 2 and not (tmp_path / "scores.json").exists()


def test_an_encoder_saved_again_is_marked_by_the_store_it_was_trained_on(
    root: Path, tmp_path: Path
) -> None:
    opened = open_encoder(f"timm:{NAME}@{saved_again(weights_of(root / 'nonprivate'), tmp_path)}")
    assert not opened.confidential
    assert recognised(opened, open_store(root / "public")).confidential, (
        "its folder is the private store's"
    )
    write_scenes(tmp_path / "elsewhere", 2, 16, first=2000)
    assert not recognised(opened, open_store(tmp_path / "elsewhere")).confidential


def test_a_run_on_public_images_from_such_weights_lies_under_confidential(
    root: Path, tmp_path: Path
) -> None:
    """Its weights and losses are functions of private images."""
    config = config_of(
        root / "public", f"timm:{NAME}@{weights_of(root / 'nonprivate')}", guarantee="none"
    )
    run = train(config, tmp_path / "run")
    assert not list(run.glob("checkpoints")) and list((run / "confidential").glob("checkpoints"))
    with pytest.raises(PrivacyError):
        make_statement(run)


CLOCKS: dict[str, Callable[[Path, Path], str]] = {
    "the run": lambda run, to: str(run),
    "its checkpoint": lambda run, to: str(find_checkpoint(run)),
    "its file": lambda run, to: f"timm:{NAME}@{weights_of(run)}",
    "its averaged file": lambda run, to: f"timm:{NAME}@{weights_of(run, 'ema.safetensors')}",
    "a link to it": lambda run, to: f"timm:{NAME}@{_linked(weights_of(run), to)}",
}


@pytest.fixture(scope="module")
def killed(root: Path) -> Path:
    """The private run as it is left when it is killed: it has only a checkpoint of the clock."""
    run = root / "killed"
    shutil.copytree(root / "parent", run)
    (run / "checkpoints").rename(run / "confidential" / "checkpoints")
    return run


@pytest.mark.parametrize("how", CLOCKS)
def test_a_checkpoint_of_the_clock_does_not_leave_through_a_child(
    root: Path, killed: Path, tmp_path: Path, how: str
) -> None:
    """53 of the 57 tensors of an exported head were bit for bit those of such a checkpoint, whose
    step depends on private batches.
    """
    spec = CLOCKS[how](killed, tmp_path)
    with pytest.raises(PrivacyError, match=r"step-0+1 of run \w{8}, was written by the clock"):
        check_run(private_config(root, spec), open_parent)
    with pytest.raises(PrivacyError, match="was written by the clock"):
        prepare(head_on(root, spec))
    assert open_encoder(spec).confidential


def test_a_run_on_public_images_from_a_checkpoint_of_the_clock_lies_under_confidential(
    root: Path, killed: Path, tmp_path: Path
) -> None:
    run = train(config_of(root / "public", str(killed), guarantee="none"), tmp_path / "run")
    assert not list(run.glob("checkpoints")) and list((run / "confidential").glob("checkpoints"))
    with pytest.raises(PrivacyError, match="has no guarantee"):
        make_statement(run)
    with pytest.raises(PrivacyError, match="was written by the clock"):
        check_run(private_config(root, str(run)), open_parent)


def test_scores_of_a_checkpoint_of_the_clock_are_confidential(
    root: Path, killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", str(killed), "--test", str(root / "public"), "--out"]
    assert main([*argv, str(tmp_path / "scores.json")]) == 2
    assert "confidential" in capsys.readouterr().err
    assert not (tmp_path / "scores.json").exists() and load_classifier(killed).confidential


@pytest.mark.parametrize(
    "how", ["averaged", pytest.param("copied and renamed", marks=pytest.mark.slow)]
)
def test_a_private_parents_epsilon_stays_through_a_file(
    root: Path, tmp_path: Path, how: str
) -> None:
    """9.00 became 1.00."""
    file = LAUNDRIES[how](root / "parent", tmp_path)
    config = private_config(root, f"timm:{NAME}@{file}")
    made = make_statement(train(config, tmp_path / "child"))["guarantee"]
    assert made["composition"]["runs"] == 2
    assert made["epsilon"] > 8 and made["this_run"]["epsilon"] == pytest.approx(1.0, abs=1e-3)


def test_the_total_is_printed_before_compute_is_spent(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The child's epsilon alone was printed."""
    config = private_config(root, str(root / "parent"))
    plan, store, _, lineage = check_run(config, open_parent)
    total, _, _ = total_epsilon(
        runs_on([*lineage, own_entry(plan, store, "new", plan.steps, lineage)], store.store_id)
    )
    assert total > 8
    expected = f"Total of these weights on this store: epsilon {up(total)}"
    assert expected in plan_text(config, plan, store, lineage) and "this run alone" in plan_text(
        config, plan, store, lineage
    )
    argv = [
        "adapt",
        "--data",
        str(root / "private"),
        "--encoder",
        str(root / "parent"),
        "--num-classes",
        "8",
        "--head",
        "prototypes",
    ]
    argv += ["--dataset-size", str(NUM), "--epsilon", "1", "--hardware.device", "cpu", "--dry-run"]
    assert (
        main(argv) == 0
        and "Total of these weights on this store: epsilon" in capsys.readouterr().out
    )
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["epsilon"] > 8 > 1.001 > found["total"]["this_run_epsilon"]


def test_the_command_line_takes_the_declaration(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(
        dict(timm.create_model(NAME, pretrained=False).state_dict()),
        tmp_path / "fetched.safetensors",
    )
    argv = [
        "adapt",
        "--data",
        str(root / "private"),
        "--encoder",
        f"timm:{NAME}@{tmp_path / 'fetched.safetensors'}",
        "--num-classes",
        "8",
    ]
    argv += [
        "--dataset-size",
        str(NUM),
        "--epsilon",
        "1",
        "--head",
        "prototypes",
        "--hardware.device",
        "cpu",
        "--dry-run",
    ]
    assert main(argv) == 2 and "--public-weights 'NAME; LICENCE; SOURCE'" in capsys.readouterr().err
    assert main([*argv, "--public-weights", DECLARED]) == 0


def test_an_entry_taken_out_of_a_manifest_is_noticed(root: Path, tmp_path: Path) -> None:
    """9.00 became 1.00: by editing manifest.json; by writing a whole checkpoint without the
    entry.
    """
    child = train(private_config(root, str(root / "parent")), tmp_path / "child")
    folder = find_checkpoint(child)
    manifest = json.loads((folder / "manifest.json").read_text())
    edited = manifest | {"lineage": manifest["lineage"][1:]}
    (folder / "manifest.json").write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match="another lineage"):
        make_statement(child)
    with pytest.raises(CheckpointError, match="another lineage"):
        open_encoder(str(child))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    checkpoint = load_checkpoint(folder)
    save_checkpoint(
        folder, edited, checkpoint.model, ema=checkpoint.ema, optimizer=checkpoint.optimizer
    )
    with pytest.raises(PrivacyError, match="first line of ledger"):
        make_statement(child)
    with (
        pytest.raises(PrivacyError, match="another lineage"),
        resumed_session(child, None, open_parent),
    ):
        pass


def test_lineage_put_on_other_tensors_is_noticed(root: Path, tmp_path: Path) -> None:
    """The metadata of public weights, copied onto private ones."""
    run = train(config_of(root / "public", guarantee="none"), tmp_path / "clean")
    clean, tainted = (weights_of(folder).read_bytes() for folder in (run, root / "nonprivate"))
    (tmp_path / "mixed.safetensors").write_bytes(
        clean[: _header(clean)] + tainted[_header(tainted) :]
    )
    with pytest.raises(CheckpointError, match="not that of its tensors"):
        open_encoder(f"timm:{NAME}@{tmp_path / 'mixed.safetensors'}")


def _header(blob: bytes) -> int:
    """Bytes before the tensors of a safetensors file."""
    return 8 + int.from_bytes(blob[:8], "little")


def test_a_file_without_lineage_needs_a_declaration_which_the_statement_repeats(
    root: Path, tmp_path: Path
) -> None:
    model = timm.create_model(NAME, pretrained=False)
    save_file(dict(model.state_dict()), tmp_path / "fetched.safetensors")
    spec = f"timm:{NAME}@{tmp_path / 'fetched.safetensors'}"
    with pytest.raises(PrivacyError, match="--public-weights 'NAME; LICENCE; SOURCE'"):
        check_run(private_config(root, spec), open_parent)
    with pytest.raises(PrivacyError, match="--public-weights 'NAME; LICENCE; SOURCE'"):
        prepare(head_on(root, spec))
    with pytest.raises(ConfigError, match="three parts"):
        check_run(private_config(root, spec, public_weights="public"), open_parent)
    assert prepare(head_on(root, spec, DECLARED)).lineage[0]["declared"]["by"] == "operator"
    made = make_statement(
        train(private_config(root, spec, public_weights=DECLARED), tmp_path / "run")
    )
    entry = made["history"]["lineage"][0]
    assert (
        entry["visibility"] == "public"
        and entry["licence"] == "CC0"
        and entry["declared"]["name"] == "Test ViT"
    )
    assert "Declared to be public by the operator" in entry["declared"]["text"]
    assert any(
        "Test ViT" in line and "not verified" in line for line in made["scope"]["not_covered"]
    )
    assert "public_weights" not in made["settings"]


def test_public_weights_that_such_a_run_kept_frozen_stay_public(root: Path, tmp_path: Path) -> None:
    """A run without a guarantee that tunes the head alone must not spoil the encoder's file for the
    store.
    """
    model = timm.create_model(NAME, pretrained=False)
    save_file(dict(model.state_dict()), tmp_path / "fetched.safetensors")
    spec = f"timm:{NAME}@{tmp_path / 'fetched.safetensors'}"
    config = replace(config_of(root / "private", spec, guarantee="none"), public_weights=DECLARED)
    train(replace(config, model=replace(config.model, tuned="head")), tmp_path / "nonprivate")
    check_run(private_config(root, spec, public_weights=DECLARED), open_parent)


def test_a_dense_trainings_state_carries_the_encoders_lineage(root: Path, tmp_path: Path) -> None:
    """``evaluate detection`` trains an encoder on: its work folder held the weights without
    lineage.
    """
    encoder = open_encoder(str(root / "nonprivate"))
    model = encoder.backbone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    open_checkpoint(
        tmp_path / "work", model, optimizer, scaler, "about", list(encoder.lineage)
    ).save(1)
    assert open_encoder(f"timm:{NAME}@{tmp_path / 'work' / FILE}").confidential


def test_a_public_store_is_not_cleared_by_such_an_encoder(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which public images are left would depend on all private ones, not on each one's own twins
    alone.
    """
    file = saved_again(weights_of(root / "nonprivate"), tmp_path)
    stores = [str(root / "public"), str(root / "private")]
    assert (
        main(
            [
                "data",
                "overlap",
                *stores,
                "--encoder",
                f"timm:{NAME}@{file}",
                "--out",
                str(root / "cleared"),
            ]
        )
        == 2
    )
    assert (
        "trained on private images" in capsys.readouterr().err and not (root / "cleared").exists()
    )


def test_a_file_in_a_run_without_a_checkpoint_is_that_runs(root: Path, tmp_path: Path) -> None:
    """Moved out of checkpoints/, the rest deleted: run.json still says on which store, and nothing
    says with which guarantee.
    """
    run = Path(shutil.copytree(root / "parent", tmp_path / "parent"))
    file = saved_again(weights_of(run), tmp_path)
    shutil.move(file, run / "best.safetensors")
    shutil.rmtree(run / "checkpoints")
    assert open_encoder(f"timm:{NAME}@{run / 'best.safetensors'}").confidential
    with pytest.raises(PrivacyError, match="without a guarantee"):
        prepare(head_on(root, f"timm:{NAME}@{run / 'best.safetensors'}"))


def test_only_trained_numbers_are_remembered(root: Path) -> None:
    """Zeros, ones and short tensors are anybody's; a reshaped or widened copy is the same
    tensor.
    """
    wide = torch.randn(16, 16)
    assert contents([torch.zeros(64, 64), torch.ones(512), torch.randn(63)]) == {}
    assert contents([wide]) == contents([wide.reshape(4, 64).double()]) != contents([wide + 1e-3])
    trained = load_checkpoint(root / "nonprivate")
    known = (
        StoreLedgers.of(root / "private").folder / f"unprotected-{trained.manifest['run_id']}.json"
    )
    remembered = set(json.loads(known.read_text())["tensors"])
    assert set(contents(trained.model.values())) <= remembered
    assert not set(contents(load_checkpoint(root / "parent").model.values())) & remembered

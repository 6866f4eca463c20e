"""Continual pre-training: the public step costs nothing, the private step starts from it, and no
private image gets into the public one.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpvision.checkpoint import load_checkpoint
from dpvision.cli import main
from dpvision.config import MAEConfig, RunConfig
from dpvision.data.open import open_store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError
from dpvision.privacy.plan import make_plan
from dpvision.recipes import RECIPES
from dpvision.statement.statement import make_statement
from dpvision.train.loop import fit
from dpvision.train.start import new_session

pytestmark = pytest.mark.usefixtures("gates_once")

PUBLIC, PRIVATE = 40, 60  # the private store is that of conftest
SIZES = ("base", "micro")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("continual") / "public"
    write_scenes(folder, PUBLIC, 16, workers=1, public=True, first=1000)
    return folder


def tiny(name: str, store: Path, records: int, parent: Path | None) -> RunConfig:
    """The recipe with small sizes; its guarantee, optimizer, clipping and augmentation are kept."""
    config = RECIPES[name]()
    assert isinstance(config.model, MAEConfig)
    encoder = replace(
        config.model.encoder, image_size=16, patch_size=4, depth=1, width=16, num_heads=2
    )
    return replace(
        config,
        privacy=replace(config.privacy, dataset_size=records, expected_batch_size=20, steps=3),
        model=replace(
            config.model, encoder=encoder, decoder_depth=1, decoder_width=16, decoder_num_heads=2
        ),
        data=replace(config.data, store=str(store)),
        optim=replace(config.optim, warmup_steps=1),
        hardware=replace(config.hardware, device="cpu", physical_batch_size=7, workers=1),
        init_from=None if parent is None else str(parent),
    )


@pytest.mark.parametrize("size", [pytest.param("base", marks=pytest.mark.slow), "micro"])
def test_the_statement_names_the_public_step_and_charges_the_private_one_alone(
    size: str, photographs: Path, scenes: Path, tmp_path: Path
) -> None:
    first, then = tmp_path / "public", tmp_path / "private"
    with new_session(
        tiny(f"vip.continual_public_{size}", photographs, PUBLIC, None), first
    ) as session:
        fit(session, quiet=True)
    public = make_statement(first)
    assert public["guarantee"] is None and [
        entry["visibility"] for entry in public["history"]["lineage"]
    ] == ["public"]

    config = tiny(f"vip.continual_{size}", scenes, PRIVATE, first)
    with new_session(config, then) as session:
        parent = load_checkpoint(first).model
        assert all(
            torch.equal(value, parent[name])
            for name, value in session.model.state_dict().items()
            if name in parent
        )
        fit(session, quiet=True)
    statement = make_statement(then)
    alone = make_plan(config.privacy)
    assert [
        (e["store_id"], e["visibility"], e["guarantee"] is None)
        for e in statement["history"]["lineage"]
    ] == [
        (open_store(photographs).store_id, "public", True),
        (open_store(scenes).store_id, "private", False),
    ]
    assert (
        statement["guarantee"]["epsilon"] == pytest.approx(alone.epsilon, rel=1e-6)
        and alone.epsilon <= 8
    )
    assert any(
        not torch.equal(value, parent[name]) for name, value in load_checkpoint(then).model.items()
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_private_store_is_refused_to_the_public_step(
    size: str, scenes: Path, tmp_path: Path
) -> None:
    config = tiny(f"vip.continual_public_{size}", scenes, PRIVATE, None)
    with (
        pytest.raises(
            DataError, match=r"is private; expected public images.*imported with --public"
        ),
        new_session(config, tmp_path / "x"),
    ):
        pass
    assert not (tmp_path / "x").exists()
    with new_session(replace(config, data=replace(config.data, images="store")), tmp_path / "y"):
        pass  # nothing else was in the way


def test_the_command_line_refuses_it_with_the_remedy(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        f"train vip.continual_public_micro --data {scenes} --privacy.dataset-size {PRIVATE} "
        "--privacy.expected-batch-size 20"
    )
    assert main([*line.split(), "--init-from", "None", "--runs", str(tmp_path), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert (
        "is private; expected public images" in said
        and "imported with --public" in said
        and "Traceback" not in said
    )


@pytest.mark.parametrize("size", SIZES)
def test_both_steps_have_all_images_of_the_run_that_is_private_alone(size: str) -> None:
    public, private, alone, warm = (
        RECIPES[name.format(size)]()
        for name in ("vip.continual_public_{}", "vip.continual_{}", "vip.{}", "synthetic.vip_{}")
    )
    counts = public.privacy.dataset_size, private.privacy.dataset_size
    assert sum(counts) == alone.privacy.dataset_size and counts[0] == round(
        alone.privacy.dataset_size / 10
    )
    assert (
        public.privacy.guarantee == "none"
        and public.data.images == "public"
        and public.init_from == f"runs/{warm.recipe}"
    )
    assert (
        replace(public, recipe=warm.recipe, privacy=warm.privacy, data=warm.data, init_from=None)
        == warm
    )
    assert (
        replace(private, recipe=alone.recipe, privacy=alone.privacy, init_from=alone.init_from)
        == alone
    )
    assert (
        private.init_from == f"runs/{public.recipe}"
        and private.privacy.steps == alone.privacy.steps
    )


@pytest.mark.slow
def test_fewer_private_images_need_more_noise(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(RECIPES["vip.continual_micro"]().privacy)
    alone = make_plan(RECIPES["vip.micro"]().privacy)
    assert 7.99 < plan.epsilon <= 8 and plan.noise.multiplier > alone.noise.multiplier
    assert main(["plan", "vip.continual_base"]) == 0
    assert "epsilon 8 at delta 2.38e-9 after 6,100 steps" in capsys.readouterr().out

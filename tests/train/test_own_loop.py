"""The loop around your own model, data set and loss: it computes what a loop by hand does, charges
before it computes, and refuses what would void the guarantee.
"""

import copy
import itertools
import json
import logging
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from made import secrets
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpvision import PrivacyConfig, private_loop
from dpvision.cli import main
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.buckets import num_buckets, passes
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.dp.noise import privatize
from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.privacy.account import store_account
from dpvision.privacy.plan import make_plan
from dpvision.privacy.sampling import derive_rng
from dpvision.train.own_loop import PrivateLoop

NUM, WIDTH, ROWS = 60, 5, 8
CONFIG = PrivacyConfig(
    dataset_size=NUM, expected_batch_size=20, steps=4, noise_multiplier=2.0, max_grad_norm=0.5
)
X = torch.randn(NUM, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.arange(NUM) % 3
Open = Callable[..., AbstractContextManager[PrivateLoop]]


class Items(Dataset[Any]):
    """X and Y as tuples, dicts or (X alone) tensors; ``change`` is applied to each x."""

    def __init__(self, kind: str = "tuple", change: Callable[[int, Tensor], Tensor] | None = None):
        self.kind, self.change = kind, change

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> Any:
        x, y = X[i] if self.change is None else self.change(i, X[i]), int(Y[i])
        return {"tuple": (x, y), "dict": {"y": y, "more": {"x": x}}, "tensor": x}[self.kind]


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return model(batch).square().sum(1)
    x, y = (batch["more"]["x"], batch["y"]) if isinstance(batch, dict) else batch
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "private" / "items"


@pytest.fixture
def open_loop(folder: Path) -> Open:
    def opened(
        model: nn.Module | None = None, data: Any = None, loss: Any = loss, **more: Any
    ) -> AbstractContextManager[PrivateLoop]:
        config = more.pop("config", CONFIG)
        more = {"physical_batch_size": ROWS, **more}
        return private_loop(model or net(), data or Items(), loss, config, folder, **more)

    return opened


def gradients(loop: PrivateLoop) -> Iterator[dict[str, Tensor]]:
    """The gradients of each step, under the keys of the tests; plain descent between them."""
    loop._secrets = secrets()
    for step in loop:
        step.backward()
        yield {name: p.grad.clone() for name, p in loop.model.named_parameters()}
        descend(loop.model)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad


def by_hand(kind: str, rows: int = ROWS, left_out: tuple[int, ...] = ()) -> Iterator[dict]:
    """The same by the functions that the loop is made of, with a batch of ``data.batch``."""

    def loss_fn(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        x = batch.image_BVCHW[:, 0, 0, 0]
        return loss(model, x if kind == "tensor" else (x, batch.label_B))

    plan, model, keys = make_plan(CONFIG), net(), secrets()
    for step in range(plan.steps):
        drawn, key = plan.draw(step, NUM, derive_rng(keys.draw, step)), StepKey(0, step)
        total = ClippedSum.zeros(model, plan.max_grad_norm)
        for part in passes(key, drawn, num_buckets(plan.expected_batch_size, rows), rows):
            i = torch.from_numpy(drawn[part])
            valid = ~torch.isin(i, torch.tensor(left_out))
            batch = Batch(i, valid, X[i][:, None, None, None], label_B=Y[i])
            total += clipped_sum(
                loss_fn, model, batch, key, max_grad_norm=plan.max_grad_norm, rows=rows
            )
        grads = privatize(total, plan, step, keys.noise).grads
        for name, p in model.named_parameters():
            p.grad = grads[name]
        yield grads
        descend(model)


def assert_equal(ours: Iterator[dict], others: Iterator[dict], within: float = 0.0) -> None:
    steps = 0
    for mine, theirs in zip(ours, others, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=within)
        steps += 1
    assert steps == CONFIG.steps


@pytest.mark.parametrize("kind", ["tuple", "dict", "tensor"])
def test_gradients_are_those_of_a_loop_by_hand_bit_for_bit(open_loop: Open, kind: str) -> None:
    with open_loop(data=Items(kind)) as loop:
        assert_equal(gradients(loop), by_hand(kind))


def test_the_size_of_a_pass_changes_rounding_only(open_loop: Open) -> None:
    with open_loop(physical_batch_size=32) as loop:
        assert_equal(gradients(loop), by_hand("tuple"), within=1e-6)


def test_a_record_that_raises_or_has_another_shape_contributes_zero(
    open_loop: Open, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(i: int, x: Tensor) -> Tensor:
        if i % 3 == 1:
            raise OSError("truncated")
        return x[:2] if i % 3 == 2 else x

    left_out = tuple(i for i in range(NUM) if i % 3)
    with caplog.at_level(logging.WARNING), open_loop(data=Items(change=broken)) as loop:
        assert_equal(gradients(loop), by_hand("tuple", left_out=left_out))
    told = [r.getMessage().removeprefix("loop: operator only: ") for r in caplog.records]
    assert len(told) == 2 and told[0].startswith("record ") and "contributed nothing" in told[1]


def jittered(i: int, x: Tensor) -> Tensor:
    return x + torch.rand(WIDTH) + float(np.random.rand()) + random.random()


def test_random_transforms_do_not_depend_on_workers_passes_or_the_global_state(
    open_loop: Open,
) -> None:
    found = []
    for workers, rows in ((0, ROWS), (2, ROWS), (0, 32)):
        torch.manual_seed(workers + rows)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        with open_loop(
            data=Items(change=jittered), workers=workers, physical_batch_size=rows
        ) as loop:
            found.append(list(gradients(loop)))
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert workers or (torch.equal(before[0], after[0]) and before[1:] == after[1:])
    assert_equal(iter(found[0]), iter(found[1]))
    assert_equal(iter(found[0]), iter(found[2]), within=1e-6)
    with open_loop() as loop:
        assert not torch.equal(next(gradients(loop))["0.weight"], found[0][0]["0.weight"])


def test_an_empty_draw_is_a_step_of_noise(open_loop: Open) -> None:
    config = replace(CONFIG, expected_batch_size=0.5, steps=12)
    with open_loop(config=config) as loop:
        found = list(gradients(loop))
    sizes = [
        len(make_plan(config).draw(step, NUM, derive_rng(secrets().draw, step)))
        for step in range(config.steps)
    ]
    assert 0 in sizes and all(grads["0.weight"].all() for grads in found)
    assert loop.ledger.steps == config.steps


# Ledger


def test_two_runs_on_one_data_set_add_up(
    open_loop: Open, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("a", "b"):
        with open_loop(run=run) as loop:
            list(gradients(loop))
    assert main(["ledger", str(folder), "--json"]) == 0
    stated = json.loads(capsys.readouterr().out)
    assert [run["run_id"] for run in stated["runs"]] == ["a", "b"]
    both = make_plan(replace(CONFIG, steps=2 * CONFIG.steps))
    assert store_account(folder).epsilon == pytest.approx(both.epsilon, rel=1e-3)
    assert loop.spent().epsilon == make_plan(CONFIG).epsilon


def test_nothing_is_charged_before_the_first_step_and_a_step_before_it_is_computed(
    open_loop: Open, folder: Path
) -> None:
    with open_loop(run="a") as loop:
        assert loop.ledger.steps == 0 and loop.spent().epsilon == 0
        step = next(iter(loop))
        assert loop.ledger.steps == 1 and all(p.grad is None for p in loop.model.parameters())
        step.backward()
        assert all(p.grad is not None for p in loop.model.parameters())
    assert loop.spent().epsilon == loop.plan.epsilon, "a run that stopped states its plan"


def test_a_resumed_run_has_the_steps_left_and_new_keys(open_loop: Open) -> None:
    with open_loop(run="a") as loop:
        first = loop._secrets
        for step in itertools.islice(loop, 2):
            step.backward()
    with pytest.raises(CheckpointError, match="run_id=a: has a ledger"), open_loop(run="a"):
        pass
    with (
        pytest.raises(PrivacyError, match="another plan"),
        open_loop(run="a", resume=True, config=replace(CONFIG, steps=9)),
    ):
        pass
    with open_loop(run="a", resume=True) as loop:
        assert loop._secrets.noise.secret() != first.noise.secret()
        assert [step.number for step in loop if step.backward()] == [2, 3]
        assert not list(loop)
    with pytest.raises(CheckpointError, match="missing"), open_loop(run="b", resume=True):
        pass


def test_a_step_that_was_not_charged_is_refused(open_loop: Open) -> None:
    """One charge and all steps, and after a resume all but one again at the plan's epsilon."""
    with open_loop() as loop:
        step = next(iter(loop))
        step.backward()
        step.number, step.done = 1, False
        with pytest.raises(PrivacyError, match="expected one of the 1 that were charged"):
            step.backward()


KILLED = """
import os, signal, sys
sys.path[:0] = {path}
from test_own_loop import CONFIG, Items, loss, net, private_loop
with private_loop(net(), Items(), loss, CONFIG, {folder!r}, run="a", workers=1) as loop:
    for step in loop:
        if step.number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        step.backward()
"""


def test_a_killed_run_stays_charged_and_is_resumed_at_once(open_loop: Open, folder: Path) -> None:
    """Also with workers, which outlive the process for seconds and would hold the ledger's lock."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "oracles")]
    done = subprocess.run(
        [sys.executable, "-c", KILLED.format(path=path, folder=str(folder))], timeout=900
    )
    assert done.returncode == -signal.SIGKILL
    with open_loop(run="a", resume=True) as loop:
        assert loop.ledger.steps == 3, "the step that was charged and not computed stays charged"
        assert [step.number for step in loop if step.backward()] == [3]


@pytest.mark.slow
def test_the_twelve_lines_of_the_page_on_opacus_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/opacus.md").read_text()
    section = page.partition("## Twelve lines\n")[2].partition("\nOpacus needs")[0]
    lines = [line[4:] for line in section.splitlines() if line]
    assert len(lines) == 12
    for i in range(40):
        path = tmp_path / "photos" / f"class{i % 10}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((70, 80, 3), 6 * i, dtype=np.uint8)).save(path)
    code = "\n".join(lines)
    for said, small in (
        ("50_000", "40"),
        ("=1000", "=8"),
        ("=500", "=2"),
        ("workers=4", "workers=1"),
    ):
        assert said in code
        code = code.replace(said, small)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(4, rel=1e-3)
    assert store_account(tmp_path / "private/photos").runs[0].steps == 2


# Refusals


def test_a_step_has_one_gradient_and_no_step_is_left_out(open_loop: Open) -> None:
    with open_loop() as loop:
        step = next(iter(loop))
        step.backward()
        with pytest.raises(PrivacyError, match=r"step=0; expected one backward\(\) a step"):
            step.backward()
        with pytest.raises(PrivacyError, match="step=1 was charged and has no gradient"):
            for _ in loop:
                pass


def test_after_an_error_a_step_is_neither_drawn_again_nor_passed_over(open_loop: Open) -> None:
    def failing(model: nn.Module, batch: Any) -> Tensor:
        if fails:
            raise MemoryError
        return loss(model, batch)

    fails = []
    with open_loop(loss=failing, run="a") as loop:
        steps = iter(loop)
        step = next(steps)
        fails.append(1)
        with pytest.raises(Exception, match=r"MemoryError|raises on random records"):
            step.backward()
        fails.clear()
        with pytest.raises(PrivacyError, match="expected a step that was not drawn before"):
            step.backward()
        with pytest.raises(PrivacyError, match="step=0 was charged and has no gradient"):
            next(steps)
    with open_loop(run="a", resume=True) as loop:
        assert next(iter(loop)).number == 1


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_a_record_whose_loss_raises_contributes_zero(
    open_loop: Open, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Else one record would decide where the run ends."""
    items = Items(kind)
    plain, rows = items.__getitem__, ROWS if kind == "tuple" else 1

    def mislabelled(i: int) -> Any:
        item = plain(i)
        if i != 7:
            return item
        return {**item, "y": 255} if kind == "dict" else (item[0], 255)

    items.__class__ = type("Mislabelled", (Items,), {"__getitem__": lambda _, i: mislabelled(i)})
    # In passes of one record all of a pass raise.
    with open_loop(data=items, physical_batch_size=rows) as loop:
        assert_equal(gradients(loop), by_hand(kind, rows, left_out=(7,)))
    told = [record.message for record in caplog.records if "operator only" in record.message]
    assert len(told) == 2 and "record 7: IndexError" in told[0] and "contributed nothing" in told[1]


def test_settings_of_other_number_types_are_the_same_plan(open_loop: Open) -> None:
    numbers = {"dataset_size": float(NUM), "expected_batch_size": 20, "steps": np.int64(4)}
    config = PrivacyConfig(**numbers, noise_multiplier=2, max_grad_norm=np.float32(0.5))
    with open_loop(config=config, run="a") as loop:
        next(iter(loop)).backward()
    with open_loop(config=CONFIG, run="a", resume=True) as loop:
        assert loop.plan == make_plan(CONFIG) and len(loop) == 3
    with open_loop(config=replace(CONFIG, max_grad_norm=1), run="b") as loop:
        next(iter(loop)).backward()
    with open_loop(config=replace(CONFIG, max_grad_norm=1.0), run="b", resume=True) as loop:
        assert len(loop) == 3


@pytest.mark.parametrize(
    ("setting", "value"), [("steps", 2.5), ("steps", True), ("max_grad_norm", "1")]
)
def test_settings_that_are_no_such_number_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting}={value!r}; expected a"):
        replace(CONFIG, **{setting: value})


def test_weights_that_no_step_changes_are_told(
    open_loop: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, net())]
    for optimizer, times in zip(optimizers, (0, 1), strict=True):
        caplog.clear()
        with open_loop(model) as loop:
            for step in loop:
                step.backward()
                optimizer.step()
        assert caplog.text.count("no trained parameter was written to") == times


def test_records_of_which_none_contributes_are_told(
    open_loop: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers that are not finite are left out without an error."""
    data = TensorDataset(X.clone().index_fill_(0, torch.arange(1, NUM), torch.nan), Y)
    with open_loop(data=data) as loop:
        for step in loop:
            step.backward()
            descend(loop.model)
    assert caplog.text.count("contributed anything") == 1
    assert caplog.text.count("records drawn contributed nothing") == 1


WEIGHT, TEACHER = torch.tensor([0.5, 1.0, 2.0]), net(1).requires_grad_(False)


def weighted(model: nn.Module, batch: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], WEIGHT.to(dtype), reduction="none")


def taught(model: nn.Module, batch: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    theirs = copy.deepcopy(TEACHER).to(dtype)(batch[0])
    return (model(batch[0]).log_softmax(1) - theirs.log_softmax(1)).square().sum(1)


def cast(model: nn.Module, batch: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return loss(model, (batch[0].to(dtype), batch[1]))


@pytest.mark.parametrize("used", [weighted, taught, cast])
def test_a_loss_may_hold_numbers_in_float32(open_loop: Open, used: Any) -> None:
    """The checks compute a copy of the model in float64, and nothing is rounded otherwise."""
    with open_loop(loss=lambda m, b: used(m, b, b[0].dtype)) as loop:
        expected = [*gradients(loop)]
    with open_loop(loss=used) as loop:
        assert_equal(gradients(loop), iter(expected))


def test_a_loop_in_each_of_torchruns_processes_is_refused(
    open_loop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes"), open_loop():
        pass


def penalised(model: nn.Module, batch: Any) -> Tensor:
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(model, (x, batch[1])).sum(), x)
    return loss(model, (x.detach() + 0.1 * g.sign(), batch[1]))


def adversarial(model: nn.Module, batch: Any) -> Tensor:
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_()
        loss(model, (x, batch[1])).sum().backward()
    assert x.grad is not None
    return loss(model, (x.detach() + 0.1 * x.grad.sign(), batch[1]))


def pruned() -> nn.Module:
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    model(X)
    return model


def thaw(model: nn.Module) -> None:
    model[2].requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)


def put_in(model: nn.Module) -> None:
    model[0] = nn.Linear(WIDTH, 4)


@pytest.mark.parametrize("change", [thaw, freeze, put_in])
def test_other_parameters_than_those_checked_are_refused(
    open_loop: Open, change: Callable[[nn.Module], None]
) -> None:
    model = net()
    model[2].requires_grad_(False)
    with open_loop(model) as loop:
        step = next(iter(loop))
        change(model)
        with pytest.raises(PrivacyError, match="the trained parameters changed"):
            step.backward()


def test_a_layer_that_mixes_records_is_found_when_it_is_put_in_later(open_loop: Open) -> None:
    model = net()
    with open_loop(model) as loop:
        steps = iter(loop)
        next(steps).backward()
        model[1] = nn.BatchNorm1d(4, affine=False)
        with pytest.raises(PrivacyError, match="uses statistics of the batch"):
            next(steps).backward()


def centred(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, (batch[0] - batch[0].mean(0), batch[1]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": centred}, "mixes records"),
        ({"loss": lambda m, b: loss(m, b).mean()}, "expected one per record"),
        (
            {"model": nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))},
            "Replace it by GroupNorm",
        ),
        ({"model": nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout())}, "global random state"),
        ({"loss": lambda m, b: loss(m, b) / len(b[0])}, "depends on the number of records"),
        ({"loss": penalised}, "takes a gradient itself"),
        ({"loss": adversarial}, "takes a gradient itself"),
        ({"model": nn.Sequential(spectral_norm(nn.Linear(WIDTH, 3)))}, "changes the buffer"),
        ({"model": pruned()}, "the model cannot be copied"),
        ({"model": net().bfloat16()}, "expected all float32 or all float64"),
        ({"model": net().requires_grad_(False)}, "no parameter with requires_grad"),
        ({"data": DataLoader(Items())}, r"Pass loader\.dataset"),
        ({"data": iter(X)}, "expected a data set with a length"),
        ({"data": TensorDataset(X[:50], Y[:50])}, "operator only: 50 records in the data set"),
        ({"data": [("text", 1)] * NUM}, "the first record cannot be used"),
        ({"config": replace(CONFIG, guarantee="none", noise_multiplier=None)}, "guarantee=none"),
        ({"config": replace(CONFIG, num_units=NUM)}, f"num_units={NUM}"),
        ({"resume": True}, "Pass run=NAME"),
        ({"public_batch": X}, "the first record cannot be used"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_a_loop_that_could_not_keep_its_guarantee_is_not_opened(
    open_loop: Open, folder: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises((PrivacyError, ConfigError, DataError), match=message), open_loop(**given):
        pass
    assert not list(folder.parent.glob("LEDGERS/*/*.jsonl"))


def test_random_numbers_of_the_data_sets_own_are_refused(open_loop: Open) -> None:
    own = np.random.default_rng(0)
    data = Items(change=lambda i, x: x + own.random())
    with (
        pytest.raises(PrivacyError, match="differs when it is read after another"),
        open_loop(data=data),
    ):
        pass


def test_a_folder_of_other_files_is_refused_and_left_as_it_is(
    open_loop: Open, folder: Path
) -> None:
    folder.mkdir(parents=True)
    (folder / "image.png").touch()
    with pytest.raises(DataError, match=r"holds other files and no store\.json"), open_loop():
        pass
    assert [path.name for path in folder.parent.rglob("*")] == ["items", "image.png"]


def test_public_records_serve_a_loss_that_random_ones_do_not_suit(open_loop: Open) -> None:
    share = X.sigmoid()

    def loss_of_shares(model: nn.Module, batch: Any) -> Tensor:
        x, target = batch
        return F.binary_cross_entropy(model(x)[:, 0].sigmoid(), target[:, 0], reduction="none")

    data = TensorDataset(X, share)
    with (
        pytest.raises(PrivacyError, match="pass public_batch="),
        open_loop(data=data, loss=loss_of_shares),
    ):
        pass
    with open_loop(data=data, loss=loss_of_shares, public_batch=[X[:5], share[:5]]) as loop:
        assert len(list(gradients(loop))) == CONFIG.steps
    with (
        pytest.raises(PrivacyError, match="mixes records"),
        open_loop(
            data=data,
            loss=lambda m, b: loss_of_shares(m, (b[0] - b[0].mean(0), b[1])),
            public_batch=[X[:5], share[:5]],
        ),
    ):
        pass

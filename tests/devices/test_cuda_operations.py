"""Operations of a private step that a GPU would refuse, do slowly, or round by a record's place,
found on a CPU by the names of the operations that run.

Under ``torch.use_deterministic_algorithms(True)`` an operation without a deterministic kernel
raises on CUDA, in the first charged step. A float64 matrix product takes 64 times as long as a
float32 one on most GPUs. A sum over rows of 128 numbers or more adds in an order that depends on
where a row begins in an aligned vector of four.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_losses import secrets, small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpvision.config import RunConfig, TimmConfig
from dpvision.data.keys import StepKey
from dpvision.dp import gram
from dpvision.dp.clip import clipped_sum
from dpvision.models import make_model
from dpvision.recipes import RECIPES
from dpvision.train.loop import fit
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.start import new_session

RAISES = {
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "max_unpool2d",
    "max_unpool3d",
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward",
    "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "nll_loss2d_forward",
    "nll_loss2d_backward",
    "_ctc_loss_backward",
    "put_",
    "put",
    "histc",
    "median.dim",
    "median.dim_values",
    "nanmedian.dim",
    "nanmedian.dim_values",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "scatter_reduce",
    "scatter_reduce_",
    "bincount",
}
"""From the documentation of torch.use_deterministic_algorithms (torch 2.15), by aten's names."""
PRODUCTS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "dot",
    "mv",
    "convolution",
    "convolution_backward",
    "_cdist_forward",
}
NAMES = (
    "vip.nano",
    *(
        pytest.param(n, marks=pytest.mark.slow)
        for n in ("dpcap.base_cap_mae", "supervised.micro", "transfer.vit_b16_last")
    ),
)


class Recorded(TorchDispatchMode):
    """Records each operation's name, with its overload, and the types of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, frozenset[torch.dtype]]] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        types = frozenset(t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        self.found.add((func.name().partition("::")[2], types))
        return func(*args, **(kwargs or {}))


def refused(found: set[tuple[str, frozenset[torch.dtype]]]) -> list[str]:
    return sorted({name for name, _ in found if name in RAISES or name.partition(".")[0] in RAISES})


def wide_products(found: set[tuple[str, frozenset[torch.dtype]]]) -> list[str]:
    return sorted(
        {
            name
            for name, types in found
            if name.partition(".")[0] in PRODUCTS and torch.float64 in types
        }
    )


@pytest.fixture(scope="module", params=NAMES)
def operations(
    request: pytest.FixtureRequest,
    stores: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Operations of a run's steps, from the first draw to the last update; the gates before it work
    in float64 on purpose.
    """
    config: RunConfig = small(RECIPES[request.param](), *stores)
    if isinstance(config.model.encoder, TimmConfig):  # whose bits of 7 rows go by their place
        config = replace(config, hardware=replace(config.hardware, physical_batch_size=16))
    with new_session(config, tmp_path_factory.mktemp("run") / "run") as session:
        with Recorded() as recorded:
            fit(session, secrets=secrets(), quiet=True)
        yield recorded.found


def test_every_operation_of_a_step_has_a_deterministic_kernel(operations: Any) -> None:
    assert len(operations) > 50 and refused(operations) == []


def test_no_product_of_a_step_is_float64(operations: Any) -> None:
    assert wide_products(operations) == []


def test_planted_operations_are_found() -> None:
    x = torch.ones(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    with Recorded() as recorded:
        torch.nn.functional.interpolate(x, size=8, mode="bilinear").sum().backward()
        x.detach().flatten(1) @ x.detach().flatten(1).T
    assert refused(recorded.found) == ["upsample_bilinear2d_backward"] and wide_products(
        recorded.found
    ) == ["mm"]


class ByPlace(TorchDispatchMode):
    """Records reductions over contiguous rows that begin at different places of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []
        self.long = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ("sum", "mean", "linalg_vector_norm", "var", "var_mean"):
            value = args[0]
            given = args[2:] if name == "linalg_vector_norm" else args[1:]
            dims = given[0] if given and given[0] is not None else list(range(value.ndim))
            dims = {d % value.ndim for d in (dims if isinstance(dims, list) else [dims])}
            # A row: the last dimensions as long as they are reduced and lie together.
            row, first = 1, value.ndim
            while first and first - 1 in dims and value.stride(first - 1) in (1, row):
                first -= 1
                row *= value.shape[first]
            steps = [value.stride(d) for d in range(first) if value.shape[d] > 1]
            self.long += row >= 128
            if row >= 128 and any(step % 4 for step in steps):
                self.found.append((name, tuple(value.shape)))
        elif name in ("_softmax", "_log_softmax") and args[0].shape[-1] > 1024:
            self.long += 1
            if args[0].shape[-1] % 8:
                self.found.append((name, tuple(args[0].shape)))
        return out


def test_no_sum_of_a_private_pass_depends_on_a_records_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H100 gave records of 197 places other norms in another order, so that every private run of
    the masked autoencoder was refused; and captions of 30,522 words other losses.
    """
    for module in ("devices", "dp.outer_products", "models.head"):
        monkeypatch.setattr(f"dpvision.{module}.adds_by_place", lambda device: True)
    monkeypatch.setitem(gram._PANEL, "cpu", gram._PANEL["cuda"])
    with ByPlace() as planted:
        torch.ones(3, 197).sum(1)
        torch.ones(3, 200).sum(1)
        torch.ones(3, 127).sum(1)
        torch.ones(3, 1030).softmax(1)
    assert planted.found == [("sum", (3, 197)), ("_softmax", (3, 1030))] and planted.long == 3
    for name in ("vip.micro", "dpcap.micro"):
        config = RECIPES[name]()
        encoder = replace(config.model.encoder, width=512, depth=1, num_heads=2, image_size=224)
        encoder = replace(encoder, patch_size=16)
        model_config = replace(config.model, encoder=encoder)
        if name == "vip.micro":
            small_decoder = {"decoder_width": 512, "decoder_depth": 1, "decoder_num_heads": 2}
            model_config = replace(model_config, **small_decoder)
        else:
            model_config = replace(model_config, vocab_size=1030)
        config = replace(config, model=model_config)
        model, batch = make_model(config.model, seed=0), example_batch(config, 3)
        loss_fn, key = loss_function(config), StepKey(0, 0)

        run = partial(clipped_sum, loss_fn, model, batch, key, max_grad_norm=1.0)
        run(check_separability=False)  # finds the route
        with ByPlace() as found:
            run(check_separability=False)
        assert found.long > 10 and found.found == [], name

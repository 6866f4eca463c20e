"""Features in bfloat16: of networks only whose operations are known, where the processor has it;
rounded in the network and nowhere else; kept apart from those in float32 and of other processors.
"""

import copy
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.devices import has_bfloat16, kernels
from dpvision.encoders import feature_precision, identity
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_cache import FeatureCache
from dpvision.encoders.feature_file import feature_array
from dpvision.encoders.feature_precision import in_precision, precision_for
from dpvision.encoders.fixed import fixed_encoder
from dpvision.encoders.identity import check_places, fingerprint, weights_digest
from dpvision.encoders.pooled import PooledNetwork, frozen
from dpvision.errors import ConfigError

from ..eval.labelled import MEAN, STD, conv_encoder, vit_encoder, write_digits

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def _network(function: nn.Module | None = None) -> Encoder:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), function or nn.ReLU(), nn.Conv2d(8, 16, 3))

    def both(net: nn.Sequential, x_BCHW: Tensor) -> list[Tensor]:
        first = net[:2](x_BCHW)
        return [first, net[2](first)]

    pooled = PooledNetwork(layers, lambda net, x_BCHW: net(x_BCHW), outputs=both)
    about = {"image_size": 16, "mean": MEAN, "std": STD, "family": "convnet"}
    return frozen(pooled, "cpu", name="made", **about)


def _images(count: int = 32) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_is_chosen_for_networks_on_processors_that_have_it(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    monkeypatch.setattr(
        feature_precision, "has_bfloat16", lambda device: has and device.type == "cpu"
    )
    network, fixed = _network(), fixed_encoder("pixels", 8)
    elsewhere = replace(network, network=None)  # computed by another library
    assert precision_for(network, "mean", "auto", "cpu") == ("bfloat16" if has else "float32")
    assert precision_for(network, "mean", "auto", GPU) == "float32"
    assert {precision_for(e, None, "auto", "cpu") for e in (fixed, elsewhere)} == {"float32"}
    for asked in ("float32", "bfloat16"):
        assert precision_for(network, "stages", asked, "cpu") == asked
    assert precision_for(fixed, None, "float32", "cpu") == "float32"
    for encoder in (fixed, elsewhere):
        with pytest.raises(ConfigError, match=r"precision='bfloat16' with .*Leave it out"):
            precision_for(encoder, None, "bfloat16", "cpu")


CAPABILITY = torch.backends.cpu.get_cpu_capability()


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (nn.GELU(approximate="tanh"), "gelu with approximate=tanh;"),
        (_Function(lambda x: x * (x.abs().mean(1, keepdim=True) + 1).rsqrt()), "rsqrt"),
        (_Function(lambda x: torch.add(x, x, alpha=0.3)), "add with alpha=0.3"),
        (_Function(lambda x: F.silu(x.float())), "silu in float32"),
        (nn.PReLU(), "_prelu_kernel"),
        (nn.GLU(dim=2), "glu"),
        (nn.GELU(), None if CAPABILITY == "AVX512" else "gelu"),
        *((f, None) for f in (nn.SiLU(), nn.Hardswish(), nn.ELU(), nn.ReLU6())),
        (nn.Sequential(nn.BatchNorm2d(8), nn.LeakyReLU()), None),
    ],
)
def test_a_network_is_in_bfloat16_only_if_all_its_operations_are_known(
    monkeypatch: pytest.MonkeyPatch, function: nn.Module, named: str | None
) -> None:
    """Among those refused are all that a helper found to give a number two results."""
    monkeypatch.setattr(feature_precision, "has_bfloat16", lambda device: True)
    encoder = _network(function)
    if named is None:
        assert precision_for(encoder, None, "auto", "cpu") == "bfloat16"
        return
    assert precision_for(encoder, None, "auto", "cpu") == "float32"
    with pytest.raises(ConfigError, match=rf"which computes {named}.*Use float32"):
        precision_for(encoder, None, "bfloat16", "cpu")


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "clone": torch.clone,
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(-0.3, 0.7),
    "clamp_min": lambda x: x.clamp_min(1e-3),
    "clamp_max": lambda x: x.clamp_max(3.0),
    "hardtanh": F.relu6,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "tanh": torch.tanh,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -100.0),
    "where": lambda x, y: torch.where(x > y, x, y),
}


def _finite(dtype: torch.dtype) -> Tensor:
    """Return all finite numbers of bfloat16, or a million random ones of float32."""
    if dtype == torch.bfloat16:
        x_N = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    else:
        generator = torch.Generator().manual_seed(0)
        x_N = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator).int().view(dtype)
    return x_N[torch.isfinite(x_N)]


def _differ(function: Callable[..., Tensor], *operands: Tensor) -> int:
    """Return how many results of a whole tensor differ from those of pieces that are too short for
    a vector loop.
    """
    whole, short = function(*operands), 15 if operands[0].dtype == torch.float32 else 31
    # in the middle of a long tensor
    few = [function(*(o[i : i + short] for o in operands)) for i in range(0, len(whole), short)]
    pieces = torch.cat(few)
    return int((~((whole == pieces) | (whole.isnan() & pieces.isnan()))).sum())


@pytest.mark.parametrize("name", sorted(feature_precision._EXACT | feature_precision._ONE_RESULT))
def test_a_known_operation_gives_a_number_one_result_wherever_it_is(name: str) -> None:
    exact = name in feature_precision._EXACT
    for dtype in (torch.bfloat16, torch.float32)[: 1 + exact]:
        x_N = _finite(dtype)[: 1 << 17]
        if name in _UNARY:
            assert _differ(_UNARY[name], x_N) == 0
        else:
            generator = torch.Generator().manual_seed(1)
            y_N = x_N[torch.randperm(len(x_N), generator=generator)]
            assert _differ(_BINARY[name], x_N, y_N) == 0


@pytest.mark.skipif(CAPABILITY != "AVX512", reason="found on AVX-512 only")
def test_the_comparison_finds_the_functions_with_two_results() -> None:
    x_N = _finite(torch.bfloat16)
    assert _differ(lambda x: F.gelu(x, approximate="tanh"), x_N) == 4
    assert _differ(torch.rsqrt, x_N[x_N > 0]) > 1000


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="what the processor has is read from Linux on x86",
)
def test_what_the_processor_has_is_what_the_kernel_says() -> None:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    assert has_bfloat16(CPU) == ("avx512_bf16" in flags) and not has_bfloat16(GPU)


@torch.inference_mode()
def test_the_network_is_in_bfloat16_and_the_averages_are_not() -> None:
    """Against the network itself converted to bfloat16, with averages of its output in float64."""
    encoder, x_BCHW = _network(), _images()
    assert encoder.network is not None and encoder.stages is not None
    layers = copy.deepcopy(encoder.network.network).to(torch.bfloat16)
    first = layers[:2](x_BCHW.bfloat16())
    last = layers[2](first)
    mean_BD = last.double().mean(dim=(2, 3))
    low = in_precision(encoder, "bfloat16")
    got_BD = low(x_BCHW, "mean")
    assert got_BD.dtype == torch.float32 and low(x_BCHW, "2x2").dtype == torch.float32
    assert (got_BD - mean_BD).abs().max() <= 1e-6 * mean_BD.abs().max()
    unit = [m / m.norm(dim=1, keepdim=True) for m in (first.double().mean(dim=(2, 3)), mean_BD)]
    row_BD = torch.cat([unit[0], 2 * unit[1]], dim=1) / 5**0.5
    assert (low(x_BCHW, "stages") - row_BD).abs().max() <= 1e-6
    # which float32 is not
    assert (encoder(x_BCHW, "mean") - mean_BD).abs().max() > 1e-4 * mean_BD.abs().max()
    assert torch.equal(in_precision(encoder, "float32")(x_BCHW), encoder(x_BCHW))


@torch.inference_mode()
@pytest.mark.parametrize("make", [_network, conv_encoder, vit_encoder])
def test_a_row_changes_by_less_than_a_few_roundings_and_has_the_same_bits_at_every_place(
    make: type,
) -> None:
    encoder = make()
    low, size = in_precision(encoder, "bfloat16"), encoder.image_size
    x_BCHW = torch.randn(32, 3, size, size, generator=torch.Generator().manual_seed(1))
    full_BD, low_BD = encoder(x_BCHW), low(x_BCHW)
    change_B = (low_BD - full_BD).norm(dim=1) / full_BD.norm(dim=1)
    assert change_B.min() > 1e-5 and change_B.max() < 8 * 2.0**-8
    for rows in (5, 32):
        check_places(low, "mean", rows)
    assert weights_digest(low) == weights_digest(encoder)


def test_features_of_both_precisions_are_kept_apart(tmp_path: Path) -> None:
    store, rows = write_digits(tmp_path / "s", 0, 20), np.arange(20)
    encoder = replace(_network(), image_size=8)
    low = in_precision(encoder, "bfloat16")
    found = [feature_array(e, "mean", 16, store, rows, workers=1) for e in (encoder, low)]
    again = [feature_array(e, "mean", 16, store, rows, workers=1) for e in (encoder, low)]
    assert not np.array_equal(*found) and len([*FeatureCache(store.path).folder.iterdir()]) == 2
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


def test_another_processor_other_threads_or_another_precision_make_other_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even of a network that has the same features of noise, as all have whose rounding hides the
    difference.
    """
    encoder = _network(_Function(lambda x: 0 * x))
    low = in_precision(encoder, "bfloat16")
    x_BCHW = _images(4)
    assert torch.equal(low(x_BCHW), encoder(x_BCHW).bfloat16().float())
    here = {"low": fingerprint(low), "full": fingerprint(encoder)}
    assert here["low"] != here["full"]
    monkeypatch.setattr(identity, "kernels", lambda device: ["another processor"])
    assert fingerprint(low) != here["low"] and fingerprint(encoder) == here["full"]


def test_what_the_kernels_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here, threads = kernels(CPU), torch.get_num_threads()
    assert kernels("cpu") == here and torch.__version__ in here
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    fewer = kernels(CPU)
    torch.set_num_threads(threads + 1)
    try:
        assert len({tuple(k) for k in (here, fewer, kernels(CPU))}) == 3
    finally:
        torch.set_num_threads(threads)

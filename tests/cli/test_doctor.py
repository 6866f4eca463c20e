"""The doctor tells the way of every parameter without memory for the weights, and measures what it
says it measures.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import timm
import torch

from dpvision.cli import main
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.models import make_model
from dpvision.recipes import RECIPES

MODELS = """
import torch
from torch import nn
from dpvision.data.batch import Batch

class Scale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).reshape(-1, len(w)).sum(0)

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 16)
        self.act = nn.PReLU(16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.hidden = nn.Parameter(torch.ones(16))
        self.forgotten = nn.Parameter(torch.ones(5))
        self.fixed = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        x = self.act(self.embed(self.fixed(x.mean((2, 3)))))
        return Scale.apply(self.second(self.first(x)), self.hidden)

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(3, 8, batch_first=True)

    def forward(self, x):
        return self.memory(x.mean(2).mT)[0][:, -1]

class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        return self.head((x - x.mean(0)).mean((2, 3)))

odd, recurrent, centred = Odd, Recurrent, Centred

def small():
    parts = nn.Conv2d(3, 8, 4, 4), nn.GroupNorm(2, 8), nn.GELU(), nn.AdaptiveAvgPool2d(1), \
        nn.Flatten(), nn.Linear(8, 5)
    return nn.Sequential(*parts)

def normed():
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 5))

def residual():
    import timm
    return timm.create_model("resnet18")

def own_loss():
    batch = Batch(torch.arange(4), torch.ones(4, dtype=torch.bool), torch.randn(4, 2, 3, 8, 8))
    return nn.Linear(8, 2), \
        lambda model, batch, key: model(batch.image_BVCHW).square().flatten(1).mean(1), batch

def mean_loss():
    model, _, batch = own_loss()
    return model, lambda model, batch, key: model(batch.image_BVCHW).mean(), batch

def raises():
    raise ValueError("weights file is missing")

def number():
    return 3
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a module of models, which is the current one."""
    (tmp_path / "doctor_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "doctor_models", raising=False)


def _json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main(["doctor", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("error: ") and "Traceback" not in err
    return out, err


def _size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vip.micro", "test_vit", "test_convnext", "doctor_models:small"])
def test_counts_are_the_real_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(capsys, name)
    if name in RECIPES:
        real: torch.nn.Module = make_model(RECIPES[name]().model, 0)
    elif ":" in name:
        real = sys.modules["doctor_models"].small()
    else:
        real = timm.create_model(name, pretrained=False)
    assert result["num_parameters"] == _size(real)
    assert (
        sum(way["num_parameters"] for way in result["ways"].values())
        == _size(real)
        == sum(result["parts"].values())
    )
    assert sum(way["num_tensors"] for way in result["ways"].values()) == len(
        list(real.parameters())
    )
    assert result["per_record_gradient_bytes"] == 4 * _size(real) and result[
        "state_bytes"
    ] == 20 * _size(real)
    assert not result["slow"] and not result["refused"] and not result["unused"]
    linear = sum(m.weight.numel() for m in real.modules() if isinstance(m, torch.nn.Linear))
    assert result["ways"]["linear"]["num_parameters"] == linear


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit on memory is Linux's")
def test_the_largest_recipe_needs_no_memory_for_its_weights() -> None:
    program = textwrap.dedent("""
        import re, resource, sys, torch
        from dpvision.cli import main
        assert main(["doctor", "vip.nano", "--json"]) == 0  # everything is imported now
        used = 1024 * int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1])
        resource.setrlimit(resource.RLIMIT_DATA, (used + 600 * 2**20, resource.RLIM_INFINITY))
        try:
            torch.ones(316_629_760)
        except RuntimeError:
            sys.exit(main(["doctor", "vip.large", "--json"]))
        sys.exit("the limit does not bite")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert '"num_parameters": 316629760' in done.stdout


def test_slow_tied_frozen_and_unused_parameters_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = _json(capsys, "doctor_models:odd", "--image-size", "8")
    own = dict.fromkeys(
        ("embed.weight", "embed.bias", "first.weight", "first.bias", "second.bias"),
        "before a backward pass of your own",
    )
    slow = {"act.weight": "used by prelu", "hidden": "used where no rule sees it", **own}
    assert result["slow"] == slow
    assert result["ways"]["slow"]["num_tensors"] == len(slow)
    assert result["tied"] == {"first.weight": ["second.weight"]}
    assert (
        result["frozen"]["names"] == ["fixed.weight", "fixed.bias"]
        and result["frozen"]["num_parameters"] == 12
    )
    assert result["unused"] == ["forgotten"]
    assert main(["doctor", "doctor_models:odd", "--image-size", "8"]) == 0
    out, err = capsys.readouterr()
    for words in (
        "act.weight",
        "used by prelu",
        "first.weight = second.weight",
        "forgotten",
        "fixed.weight",
    ):
        assert words in out
    assert "no rule" not in err, "said once, in the table"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("doctor_models:normed", "1", "GroupNorm or LayerNorm"),
        ("doctor_models:recurrent", None, "memory.weight_ih_l0"),
        ("doctor_models:mean_loss", None, "Do not average"),
    ],
)
def test_a_refused_model_is_told_with_the_remedy(
    name: str, layer: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--image-size", "16"]
    (refusal,) = _json(capsys, name, *size)["refused"]
    assert words in refusal["message"]
    assert refusal["layers"][:1] == ([layer] if layer else [])
    assert main(["doctor", name, *size]) == 0
    assert "REFUSED" in capsys.readouterr().out
    out, err = _refused(capsys, name, *size, "--measure")
    assert "REFUSED" in out and words in err


def test_every_batch_norm_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    (refusal,) = _json(capsys, "doctor_models:residual")["refused"]
    real = timm.create_model("resnet18", pretrained=False)
    # timm's own subclass of BatchNorm2d would make a second kind.
    assert refusal["layers"] == [
        name for name, m in real.named_modules() if isinstance(m, torch.nn.BatchNorm2d)
    ]


def test_a_timm_name_is_trained_with_its_statistics_fixed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = _json(capsys, "test_resnet")
    assert not result["refused"] and not result["slow"]
    real = timm.create_model("test_resnet", pretrained=False)
    norms = [m for m in real.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert result["ways"]["batch norm"]["num_tensors"] == 2 * len(norms)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["vip.bsae"], "Did you mean vip.base"),
        (["resnet5"], "resnet50"),
        (["resnet50.nope"], "nope"),
        ([""], "module:function"),
        (["nowhere_at_all:make"], "cannot be imported"),
        (["doctor_models:smal"], "Did you mean doctor_models:small"),
        (["doctor_models:raises"], "ValueError: weights file is missing at doctor_models.py"),
        (["doctor_models:number"], "returns int"),
        (["doctor_models:small", "--image-size", "2"], "--image-size"),
        (["vip.micro", "--image-size", "32"], "Drop it"),
        (["vip.micro", "--max-minutes", "nan"], "--max-minutes"),
        (["vip.micro", "--physical-batch-size", "0"], "physical_batch_size"),
    ],
)
def test_wrong_input_gets_one_clear_error(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = _refused(capsys, *argv)
    assert words in err and not out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["doctor_models:small", "doctor_models:odd", "doctor_models:own_loss"]
)
def test_measured_figures_fit_together(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(
        capsys, name, "--measure", "--device", "cpu", "--image-size", "16", "--max-minutes", "0.5"
    )
    measured = result["measured"]
    assert measured["device"] == "cpu" and measured["precision"] == "float32"
    oracle, largest, step = measured["oracle"], measured["largest_physical_batch"], measured["step"]
    assert (
        0 <= oracle["difference"] <= 1e-5
        and 0 <= oracle["norm_difference"] <= 1e-5
        and oracle["float64"] == "passed"
    )
    images = 4 * (2 * 3 * 8 * 8 if name.endswith("own_loss") else 3 * 16 * 16)
    assert largest["how"] == "estimated" and largest["record_bytes"] >= images
    assert largest["records"] * largest["record_bytes"] <= largest["available_bytes"]
    assert 1 <= step["physical_batch_size"] <= 64 and step["rounds"] >= 3
    for key in ("private_s", "non_private_s", "price"):
        assert 0 < step[key]["low"] <= step[key]["median"] <= step[key]["high"]
    assert step["records_per_s"] == pytest.approx(
        step["physical_batch_size"] / step["private_s"]["median"]
    )


def test_a_given_batch_is_timed_and_none_is_searched_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [
        "doctor",
        "doctor_models:small",
        "--measure",
        "--device",
        "cpu",
        "--image-size",
        "16",
        "--max-minutes",
        "0.05",
    ]
    assert main([*argv, "--physical-batch-size", "5", "--precision", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    assert "5 records in" in out and "overhead" in out and "bfloat16" in out and "fits" not in out
    assert "1/3" in err and "3/3" in err


def test_records_that_mix_are_refused_when_measured(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = _refused(capsys, "doctor_models:centred", "--measure", "--image-size", "8", "--json")
    assert "mixes records" in err and "mixes records" in json.loads(out)["measured"]["failed"]


def test_a_wrong_one_pass_sum_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off(*args: object, method: str = "one_pass", **kwargs: object) -> ClippedSum:
        made = clipped_sum(*args, method=method, **kwargs)  # type: ignore[arg-type]
        if method == "one_pass":
            made.grads["0.weight"].mul_(1.0001)
        return made

    monkeypatch.setattr("dpvision.doctor.bench.clipped_sum", off)
    out, err = _refused(
        capsys, "doctor_models:small", "--measure", "--device", "cpu", "--image-size", "16"
    )
    assert "differs from the oracle" in err and "measured" not in out

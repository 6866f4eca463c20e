"""The GPU kernels of a private pass, against float64: under Triton's interpreter on a CPU, compiled
for GPUs that are not here, and on a GPU.
"""

import os
import subprocess
import sys

import pytest
import torch

CHECK = """
import torch
from dpvision.dp.pass_triton import layer_norm_sums, scaled_rows, tile_sums

def check(device, dtypes, shapes):
    generator = torch.Generator(device).manual_seed(0)
    def rows(*shape):
        return torch.randn(shape, device=device, generator=generator)
    for dtype in dtypes:
        for places, p, q in shapes:
            left = rows(3, places, p).to(dtype)
            right = rows(3, places, q + 5).to(dtype)[:, :, :q]  # rows with a gap between them
            value, norm_l, norm_r, own_l, own_r = (t.double() for t in tile_sums(left, right))
            gram_l, gram_r = (side.double() @ side.double().mT for side in (left, right))
            for ours, exact in (
                (value.sum(1), (gram_l * gram_r).sum((1, 2))),
                (norm_l.square().sum(1), gram_l.square().sum((1, 2))),
                (norm_r.square().sum(1), gram_r.square().sum((1, 2))),
                (own_l, gram_l.diagonal(dim1=1, dim2=2)),
                (own_r, gram_r.diagonal(dim1=1, dim2=2)),
            ):
                torch.testing.assert_close(ours, exact, rtol=5e-5, atol=0)
            alone = [tile_sums(left[i : i + 1], right[i : i + 1]) for i in range(3)]
            whole = tile_sums(left, right)
            for number in range(5):  # bit for bit, whatever the company
                assert torch.equal(torch.cat([one[number] for one in alone]), whole[number])
            x, g = rows(3, places, p), rows(3, places, p).to(dtype)
            y, mean, rstd = torch.native_layer_norm(x, (p,), None, None, 1e-5)
            weight, bias = layer_norm_sums(x, mean, rstd, g)
            exact = y.double() * g.double(), g.double()
            for ours, terms in zip((weight, bias), exact, strict=True):
                off = (ours.double() - terms.sum(1)).abs()
                assert (off <= 1e-6 * (places + 4) * terms.abs().sum(1)).all()
            factor = rows(3).abs()
            for part in (left, right, left[:, 1:], left.mT):
                expected = (part.float() * factor[:, None, None]).to(dtype)
                assert torch.equal(scaled_rows(part, factor), expected)
    print("equal")
"""


@pytest.mark.slow
def test_the_kernels_are_right_under_the_interpreter() -> None:
    """In float16: the interpreter's bfloat16 products are wrong."""
    pytest.importorskip("triton")
    shapes = "((2, 7, 16), (64, 40, 17), (70, 96, 130), (131, 20, 40), (270, 20, 20))"
    done = subprocess.run(
        [sys.executable, "-c", f"{CHECK}\ncheck('cpu', [torch.float16], {shapes})"],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability: int) -> None:
    """To machine code with Triton's own assembler, within the shared memory of the GPU: 99 KiB on
    a desktop's (8.9), at least 160 on the others.
    """
    pytest.importorskip("triton")
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpvision.dp import pass_triton as kernels

    room, stages = (101376, 2) if capability == 89 else (163 * 2**10, 4)
    for kernel, pointers, constants in (
        (kernels._tile_sums, "bf16 bf16 fp32", {"TILES": 2, "SIDE": kernels.TILE, "TERMS": 64}),
        (kernels._tile_sums, "fp16 fp16 fp32", {"TILES": 1, "SIDE": 64, "TERMS": 64}),
        (kernels._layer_norm_sums, "fp32 bf16 fp32 fp32 fp32 fp32", {"COLUMNS": 64, "PLACES": 32}),
        (kernels._scale, "bf16 fp32 bf16", {"FLAT": 4096}),
    ):
        names = [name for name in kernel.arg_names if name not in constants]
        types = [f"*{dtype}" for dtype in pointers.split()]
        types += ["i32"] * (len(names) - len(types))
        signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"num_warps": 4 if constants.get("SIDE") == 64 else 8, "num_stages": stages}
        made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(made.asm["cubin"]) > 1000
        assert made.metadata.shared <= room, kernel


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels_right() -> None:
    made: dict[str, object] = {"torch": torch}
    exec(CHECK, made)
    shapes = ((2, 7, 16), (50, 768, 2304), (70, 96, 130), (197, 512, 2048), (270, 20, 20))
    made["check"]("cuda", [torch.float16, torch.bfloat16], shapes)  # type: ignore[operator]

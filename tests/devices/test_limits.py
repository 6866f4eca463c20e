"""What a machine lacks is refused in a sentence, before a step is charged: CUDA, a GPU for each
rank, memory, bfloat16.
"""

import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_losses import secrets, small
from torch import Tensor

from dpvision.cli import main
from dpvision.cli.train import TrainArgs, train
from dpvision.config import RunConfig
from dpvision.data.batch import Batch
from dpvision.devices import loader_threads, require_precision, slow_precision
from dpvision.dp.compiled import CompiledBlocks
from dpvision.errors import ConfigError, DataError
from dpvision.eval.dense.settings import DenseHardware
from dpvision.recipes import RECIPES
from dpvision.train import distributed, loop, memory, start, step
from dpvision.train.distributed import Group, join
from dpvision.train.start import new_session

from .strict_device import DEVICE

pytestmark = pytest.mark.usefixtures("gates_once")


@pytest.fixture
def config(stores: tuple[Path, Path]) -> RunConfig:
    config = small(RECIPES["vip.nano"](), *stores)
    return replace(config, hardware=replace(config.hardware, physical_batch_size=30))


def ledgers(store: Path) -> dict[Path, int]:
    """The ledgers beside a store and their sizes."""
    return {path: path.stat().st_size for path in store.parent.glob("LEDGERS/*/*")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize(
    ("version", "words"),
    [(None, "built without CUDA"), ("13.2", "no GPU with a driver for CUDA 13.2")],
)
def test_cuda_that_is_not_there_is_refused_with_the_reason(
    version: str | None,
    words: str,
    stores: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = ledgers(stores[0])
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.chdir(tmp_path)
    argv = [
        "vip.micro_random_start",
        "--data",
        str(stores[0]),
        "--privacy.dataset-size",
        "60",
        "--privacy.expected-batch-size",
        "20",
    ]
    assert main(["train", *argv, "--name", "x", "--hardware.device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert (
        "device='cuda'" in error
        and words in error
        and "--hardware.device auto" in error
        and "Traceback" not in error
    )
    assert ledgers(stores[0]) == before, "something was charged"


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "2"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=2 with 2 GPUs.*--nproc-per-node 2"):
        distributed.join("cuda")


@pytest.mark.parametrize(
    ("precision", "capability", "device", "warned"),
    [
        ("bfloat16", "AVX2", "cpu", True),
        ("bfloat16", "NO AVX", "cpu", True),
        ("bfloat16", "AVX512", "cpu", False),
        ("bfloat16", "DEFAULT", "cpu", False),
        ("bfloat16", "AVX2", "cuda", False),
        ("float32", "AVX2", "cpu", False),
        ("float32", "AVX2", "cuda", True),
    ],
)
def test_a_precision_that_is_slow_here_is_named(
    precision: str, capability: str, device: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert (slow_precision(precision, torch.device(device)) is not None) == warned


@pytest.mark.slow
def test_a_run_on_such_a_cpu_says_so(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for precision, warned in (("float32", False), ("bfloat16", True)):
        config = replace(config, hardware=replace(config.hardware, precision=precision))
        train(TrainArgs(recipe="vip.nano", runs=tmp_path, name=precision, quiet=True), config, {})
        assert ("This CPU has no bfloat16 instructions" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(("precision", "compared"), [("float32", 30), ("bfloat16", 16)])
def test_a_batch_that_fits_in_low_precision_alone_is_not_compared_in_float32(
    precision: str,
    compared: int,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(config, hardware=replace(config.hardware, compile=True, precision=precision))
    seen: list[int] = []

    def checked(
        loss_fn: object, model: object, batch: Batch, key: object, blocks: CompiledBlocks
    ) -> None:
        seen.append(len(batch.record_id_B))
        assert blocks.num_records == compared
        if len(seen) == 2:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(start, "check_compiled", checked)
    # Nothing else need compile the blocks.
    monkeypatch.setattr(start, "check_reference_bits", lambda _: None)
    with new_session(config, tmp_path / "fits") as session:
        assert (
            seen == [compared] and session.blocks is not None and session.blocks.num_records == 30
        )
    before = ledgers(Path(str(config.data.store)))
    with (
        pytest.raises(ConfigError, match=rf"out of memory on cpu .* {compared} records. Lower"),
        new_session(config, tmp_path / "not"),
    ):
        pass
    assert ledgers(Path(str(config.data.store))) == before and not (tmp_path / "not").exists()


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_without_bfloat16_is_refused(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    cuda = torch.device("cuda")
    require_precision("float16", cuda), require_precision("bfloat16", torch.device("cpu"))
    for check in (
        lambda: require_precision("bfloat16", cuda),
        lambda: DenseHardware(precision="bfloat16").autocast(cuda),
    ):
        if supported:
            check()
        else:
            with pytest.raises(
                ConfigError,
                match=r"Tesla V100, compute capability 7.0; .*--hardware.precision float16",
            ):
                check()


def small_memory(monkeypatch: pytest.MonkeyPatch, most: int, after: int = 0) -> None:
    """A device on which a pass of more than ``most`` records has no memory; from the ``after``-th
    pass on.
    """
    own, passes = start.loss_function, 0

    def loss_function(config: RunConfig) -> Any:
        loss_fn = own(config)

        def limited(model: Any, batch: Batch, key: Any) -> Tensor:
            nonlocal passes
            if batch.record_id_B.device == DEVICE:
                passes += 1
                if len(batch.record_id_B) > most and passes > after:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss_fn(model, batch, key)

        return limited

    monkeypatch.setattr(start, "loss_function", loss_function)
    monkeypatch.setattr(start, "check_gates", lambda *_: None)  # on the CPU, which has memory
    monkeypatch.setattr(distributed, "join", lambda *_: Group(0, 1, DEVICE))


ENDS = [pytest.param(count, count, marks=pytest.mark.slow) for count in (30, 3)]


@pytest.mark.parametrize(("most", "named"), [(11, 7), *ENDS])
def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(
    most: int, named: int, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three records are needed in any case, to find how the parameters are used."""
    small_memory(monkeypatch, most)
    store = Path(config.data.store or "")
    before = ledgers(store)
    if most >= 30:
        with new_session(config, tmp_path / "run"):
            return
    with (
        pytest.raises(
            ConfigError,
            match=rf"physical_batch_size=30; out of memory .* {named} fits.*"
            rf"--hardware.physical-batch-size {named}:",
        ),
        new_session(config, tmp_path / "run"),
    ):
        pass
    assert ledgers(store) == before, "a step was charged"
    fitting = replace(config, hardware=replace(config.hardware, physical_batch_size=named))
    with new_session(fitting, tmp_path / "again"):
        pass


@pytest.mark.slow
def test_a_model_that_does_not_fit_at_all_is_refused(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_memory(monkeypatch, 0)
    with (
        pytest.raises(ConfigError, match=r"out of memory .* even with one record.*smaller model"),
        new_session(config, tmp_path / "run"),
    ):
        pass


@pytest.mark.slow
def test_memory_lost_during_a_run_names_the_step_and_a_smaller_batch(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_memory(monkeypatch, 30)
    with new_session(config, tmp_path / "run") as session:

        def lost(*_: Any, **more: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(loop, "step_sum", lost)
        with pytest.raises(
            ConfigError,
            match=r"physical_batch_size=30; out of memory .* step 0.*"
            r"--resume --hardware.physical-batch-size 15\.",
        ):
            loop.fit(session, secrets=secrets(), quiet=True)
        assert session.run is not None and session.run.ledger.steps == 1, (
            "the step was charged before it ran"
        )


def test_any_command_out_of_memory_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("dpvision.cli.evaluate.run", run)
    assert main(["evaluate", "x"]) == 2
    error = capsys.readouterr().err
    assert (
        "Tried to allocate 2.00 GiB" in error
        and "--batch-size" in error
        and "Traceback" not in error
    )
    monkeypatch.setattr(
        "dpvision.cli.evaluate.run", lambda argv: (_ for _ in ()).throw(RuntimeError("a bug"))
    )
    with pytest.raises(RuntimeError, match="a bug"):
        main(["evaluate", "x"])


def test_the_next_batch_is_copied_by_a_thread_while_this_one_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batch k + 1 is sent on the copying stream, and pinned by another thread than the one that
    computes, before batch k is released; the computing stream waits for its own copy only.
    """
    told: list[str] = []
    copied = [threading.Event() for _ in range(3)]
    threads: set[int] = set()

    class Stream:
        def record_event(self) -> str:
            return told[-1]

        def wait_event(self, event: str) -> None:
            told.append(f"wait for {event}")

    class Sent:
        def record_stream(self, stream: Stream) -> None:
            told.append("keep")

    def to_device(batch: Any, device: torch.device) -> tuple[Sent]:
        told.append(f"copy {batch.record_id_B}")
        threads.add(threading.get_ident())
        copied[batch.record_id_B].set()
        return (Sent(),)

    copying, computing = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(step, "to_device", to_device)
    batches = (SimpleNamespace(record_id_B=k, valid_B=None) for k in range(3))
    for k, (_, rows) in enumerate(step._copied(batches, torch.device("cuda"))):  # type: ignore[arg-type]
        assert copied[min(k + 1, 2)].wait(900), (
            "the next batch is not copied while this one is computed"
        )
        told.append(f"compute {rows.record_id_B}")
    for k in range(3):
        assert (
            told.index(f"copy {k}") < told.index(f"wait for copy {k}") < told.index(f"compute {k}")
        )
    assert told.count("keep") == 3 and threads and threading.get_ident() not in threads


def test_a_fault_of_the_loader_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> Any:
        yield SimpleNamespace(record_id_B=0, valid_B=None)
        raise DataError("a shard cannot be read")

    for name, value in (
        ("Stream", lambda device: SimpleNamespace(record_event=str)),
        ("device", contextlib.nullcontext),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=str)
    )
    monkeypatch.setattr(step, "to_device", lambda batch, device: ())
    found = step._copied(batches(), torch.device("cuda"))
    next(found)
    with pytest.raises(DataError, match="cannot be read"):
        next(found)


def test_float32_convolutions_of_a_run_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN rounds their operands to ten bits by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    join("cpu")
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("workers", "device", "cores", "ranks", "expected"),
    [
        (None, "cpu", 2, "1", 2),
        (None, "cpu", 16, "1", 4),
        (None, "cpu", 64, "2", 8),
        (None, "cuda", 16, "1", 16),
        (None, "cuda", 64, "8", 8),
        (None, "cuda", 4, "8", 2),
        (3, "cuda", 16, "1", 3),
    ],
)
def test_threads_of_the_loader_follow_the_machine(
    workers: int | None,
    device: str,
    cores: int,
    ranks: str,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert loader_threads(workers, torch.device(device)) == expected


@pytest.mark.slow
def test_largest_halves() -> None:
    tried: list[int] = []

    def run(num: int) -> None:
        tried.append(num)
        if num > 5:
            raise torch.OutOfMemoryError

    assert memory.largest(run, 100) == 3 and tried == [100, 50, 25, 12, 6, 3]

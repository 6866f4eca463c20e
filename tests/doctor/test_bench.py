"""The doctor from Python: findings as a value, figures of this machine, and its searches."""

import os

import pytest
import torch

from dpvision.doctor import find_subject, look, measure
from dpvision.doctor.bench import available_bytes, most_that_fit, peak_bytes
from dpvision.models import make_model
from dpvision.recipes import RECIPES


def test_findings_are_those_of_the_real_network() -> None:
    found = look(find_subject("vip.micro"))
    real = make_model(RECIPES["vip.micro"]().model, 0)
    assert found.sizes == {name: p.numel() for name, p in real.named_parameters()}
    assert sorted(name for names in found.ways.values() for name in names) == sorted(found.trained)
    assert not found.refused and not found.slow and not found.frozen


def test_progress_is_handed_to_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    measured = measure(
        look(find_subject("vip.micro")), num_timed=2, max_minutes=0.05, say=lines.append
    )
    assert [line[:3] for line in lines] == ["1/3", "2/3", "3/3"]
    assert measured["step"]["physical_batch_size"] == 2
    said = capsys.readouterr()
    assert not said.out and not said.err


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 100, 255, 256, 257, 4095, 5000])
def test_the_search_ends_a_sixteenth_below_the_limit_at_most(limit: int) -> None:
    tried: list[int] = []

    def fits(num: int) -> bool:
        tried.append(num)
        return num <= limit

    found, final = most_that_fit(fits, most=4096, stop=lambda: False)
    best = min(limit, 4096)
    assert best - max(1, found // 16) < found <= best
    assert max(tried) <= 4096 and len(tried) < 20 and final == (limit < 4096)
    assert most_that_fit(fits, most=4096, stop=lambda: True) == (0, False)


@pytest.mark.slow
def test_peak_memory_is_counted_to_the_byte() -> None:
    def step() -> None:
        a = torch.empty(1000, dtype=torch.float64)
        del a
        b, c = torch.empty(500, dtype=torch.float32), torch.empty(2000, dtype=torch.float32)
        del b, c

    assert peak_bytes(step) == 10_000


def test_free_memory_is_below_the_machines() -> None:
    assert 0 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

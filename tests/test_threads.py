"""Pieces of work, each on one thread."""

import threading

import pytest
import torch

from dpvision.threads import map_pieces

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_pieces_from_single_threads():
    meeting = threading.Barrier(3, timeout=900)

    def work(piece: int) -> tuple[int, int, int]:
        if piece < 3:
            meeting.wait()  # breaks unless three pieces run at the same time
        return piece, torch.get_num_threads(), threading.get_ident()

    found = map_pieces(work, range(20), CPU)
    assert [piece for piece, _, _ in found] == list(range(20))
    assert {threads for _, threads, _ in found} == {1}
    assert threading.get_ident() not in {ident for _, _, ident in found}
    assert torch.get_num_threads() == 3


def test_pieces_of_another_device_run_on_the_calling_thread():
    def work(piece: int) -> tuple[int, int]:
        return threading.get_ident(), torch.get_num_threads()

    assert map_pieces(work, range(4), torch.device("meta")) == [(threading.get_ident(), 3)] * 4


def test_a_failed_piece_raises_and_the_number_of_threads_returns():
    def work(piece: int) -> int:
        if piece == 2:
            raise ValueError("piece 2")
        return piece

    with pytest.raises(ValueError, match="piece 2"):
        map_pieces(work, range(8), CPU)
    assert torch.get_num_threads() == 3


def test_a_product_has_the_same_bits_for_any_number_of_threads():
    a, b = torch.randn(2, 6, 300, 300, generator=torch.Generator().manual_seed(0))

    def by(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        return torch.stack(map_pieces(lambda i: a[i] @ b[i], range(6), CPU))

    assert torch.equal(by(3), by(2)) and torch.equal(by(3), by(1))

"""Captions from a captioner: greedy against full passes, beams against all captions there are,
samples against the softmax.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dpvision.config import BOS_ID, EOS_ID, PAD_ID, CaptionerConfig, CrossDecoderConfig, ViTConfig
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models import make_model
from dpvision.models.captioner import Captioner, caption_losses
from dpvision.models.generate import GenerateSettings, Said, draw_words, generate

ENCODER = ViTConfig(
    image_size=16, patch_size=4, depth=1, width=24, num_heads=3, qkv_bias=False, train_cls=False
)
CONFIG = CaptionerConfig(
    encoder=ENCODER,
    decoder=CrossDecoderConfig(depth=2, width=16, num_heads=4),
    vocab_size=20,
    num_tokens=9,
)


def make_captioner(
    vocab_size: int = 20, num_tokens: int = 9, seed: int = 0, end: float = 0.0
) -> Captioner:
    """A captioner in float64 that has its mind made up: its logits differ by several units, and
    captions end at various places.
    """
    model = (
        make_model(replace(CONFIG, vocab_size=vocab_size, num_tokens=num_tokens), seed)
        .double()
        .eval()
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        model.word_head.weight.mul_(3)
        model.word_head.bias[EOS_ID] += end
    return model


def make_memory(model: Captioner, num: int = 12) -> Tensor:
    """What the decoder is told of images that differ from each other more than noise through a
    fresh encoder does.
    """
    return 4 * torch.randn(
        num,
        17,
        model.cfg.decoder.width,
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float64,
    )


def uniform(num: int, captions: int, words: int, seed: int = 0) -> Tensor:
    return torch.rand(
        num, captions, words, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def row(ids: tuple[int, ...], num_tokens: int) -> list[int]:
    return [BOS_ID, *ids, EOS_ID] + [PAD_ID] * (num_tokens - 2 - len(ids))


@torch.no_grad()
def loss_of(model: Captioner, memory_1SD: Tensor, captions: list[tuple[int, ...]]) -> list[float]:
    """Training losses of captions of one image."""
    token_BL = torch.tensor([row(ids, model.cfg.num_tokens) for ids in captions])
    return caption_losses(model, memory_1SD.expand(len(captions), -1, -1), token_BL).tolist()


@torch.no_grad()
def full_passes(
    model: Captioner,
    memory_1SD: Tensor,
    prompt: tuple[int, ...] = (),
    min_words: int = 1,
    max_words: int = 10**6,
) -> tuple[int, ...]:
    """The greedy caption by a whole pass of the decoder for each word."""
    said = list(prompt)
    while len(said) < min(model.cfg.num_tokens - 2, len(prompt) + max_words):
        logit_V = model.logits(model.decode(torch.tensor([[BOS_ID, *said]]), memory_1SD))[
            0, -1
        ].clone()
        logit_V[[PAD_ID, BOS_ID]] = -math.inf
        if len(said) - len(prompt) < min_words:
            logit_V[EOS_ID] = -math.inf
        if (word := int(logit_V.argmax())) == EOS_ID:
            break
        said.append(word)
    return tuple(said)


@pytest.mark.parametrize("end", [-2.0, 5.0, 7.0])
@pytest.mark.parametrize(
    "limits", [{}, {"prompt": (7, 3, 5)}, {"min_words": 4}, {"min_words": 0, "max_words": 2}]
)
def test_greedy_with_kept_keys_says_what_full_passes_say(end: float, limits: dict) -> None:
    model = make_captioner(end=end)
    memory_BSD = make_memory(model)
    said = generate(model, memory_BSD, GenerateSettings(**limits))
    assert [s[0].ids for s in said] == [full_passes(model, m[None], **limits) for m in memory_BSD]


def test_captions_end_at_various_places_in_these_tests() -> None:
    model = make_captioner(end=5.0)
    lengths = {len(s[0].ids) for s in generate(model, make_memory(model))}
    assert len(lengths) >= 4 and max(lengths) == model.cfg.num_tokens - 2


@pytest.mark.parametrize("prompt", [(), (4, 11)])
def test_logits_of_a_step_are_those_of_a_full_pass(prompt: tuple[int, ...]) -> None:
    model = make_captioner().float()
    memory_BSD, cache = make_memory(make_captioner()).float(), None
    token_BL = torch.tensor([[BOS_ID, *prompt, 5, 12, 6]]).expand(len(memory_BSD), -1)
    with torch.no_grad():
        full_BLV = model.logits(model.decode(token_BL, memory_BSD))
        cache = model.start_cache(memory_BSD)
        for place in range(token_BL.shape[1]):
            logit_BV, cache = model.step(token_BL[:, place], cache)
            assert torch.allclose(logit_BV, full_BLV[:, place], atol=1e-5)
            # Halves, doubled and turned round, and back again: what is selected is the record,
            # whole.
            cache = cache.select(torch.arange(12).flip(0).repeat_interleave(2)).select(
                torch.arange(22, -1, -2)
            )


def test_score_is_minus_the_training_loss() -> None:
    model = make_captioner(end=5.0)
    memory_BSD = make_memory(model)
    for settings in (
        GenerateSettings(),
        GenerateSettings(method="beam", num=3),
        GenerateSettings(method="beam", length_penalty=0.3, num=2),
    ):
        for memory_SD, said in zip(memory_BSD, generate(model, memory_BSD, settings), strict=True):
            losses = loss_of(model, memory_SD[None], [s.ids for s in said])
            assert [-s.log_probability for s in said] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("end", [-1.0, 5.0])
def test_with_room_for_every_beginning_a_beam_search_is_exhaustive(
    length_penalty: float, end: float
) -> None:
    model = make_captioner(
        vocab_size=7, num_tokens=6, end=end
    )  # four words; captions of one to four of them: 340
    memory_BSD = make_memory(model, 6)
    every = [ids for length in range(1, 5) for ids in itertools.product(range(3, 7), repeat=length)]
    settings = GenerateSettings(method="beam", beams=256, num=9, length_penalty=length_penalty)
    for memory_SD, said in zip(memory_BSD, generate(model, memory_BSD, settings), strict=True):
        total = [
            -loss * (len(ids) + 1)
            for loss, ids in zip(loss_of(model, memory_SD[None], every), every, strict=True)
        ]
        order = sorted(
            range(len(every)), key=lambda i: -total[i] / (len(every[i]) + 1) ** length_penalty
        )
        assert [s.ids for s in said] == [every[i] for i in order[:9]]


def slow_beams(
    model: Captioner,
    memory_1SD: Tensor,
    beams: int,
    num: int,
    penalty: float,
    prompt: tuple[int, ...],
) -> list[tuple[int, ...]]:
    """Beam search of one image in lists, by full passes and without leaving off early."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    most = model.cfg.num_tokens - 2 - len(prompt)
    for place in range(most + 1):
        grown = []
        for total, ids in live:
            with torch.no_grad():
                log_probability = (
                    model.logits(model.decode(torch.tensor([[BOS_ID, *prompt, *ids]]), memory_1SD))[
                        0, -1
                    ]
                    .log_softmax(0)
                    .tolist()
                )
            if place >= 1:
                ended.append(((total + log_probability[EOS_ID]) / (place + 1) ** penalty, ids))
            grown += [
                (total + log_probability[word], (*ids, word))
                for word in range(3, model.cfg.vocab_size)
            ]
        live = sorted(grown, reverse=True)[:beams]
    return [(*prompt, *ids) for _, ids in sorted(ended, reverse=True)[:num]]


@pytest.mark.parametrize("end", [-1.0, 5.0, 7.0])
@pytest.mark.parametrize(
    ("beams", "num", "penalty", "prompt"),
    [(1, 1, 1.0, ()), (3, 2, 1.0, ()), (4, 4, 0.5, (8,)), (3, 1, 0.0, (5, 5))],
)
def test_beams_are_those_of_a_search_in_lists(
    end: float, beams: int, num: int, penalty: float, prompt: tuple[int, ...]
) -> None:
    """Images end at different times here; what leaves the batch must not change what stays."""
    model = make_captioner(end=end)
    memory_BSD = make_memory(model)
    said = generate(
        model,
        memory_BSD,
        GenerateSettings(
            method="beam", beams=beams, num=num, length_penalty=penalty, prompt=prompt
        ),
    )
    assert [[s.ids for s in own] for own in said] == [
        slow_beams(model, m[None], beams, num, penalty, prompt) for m in memory_BSD
    ]


def test_a_beam_search_finds_nothing_less_likely_than_the_greedy_caption() -> None:
    model = make_captioner(end=5.0)
    memory_BSD = make_memory(model)
    greedy, beam = (
        generate(model, memory_BSD),
        generate(model, memory_BSD, GenerateSettings(method="beam", beams=8)),
    )
    gain = [b[0].log_probability - g[0].log_probability for g, b in zip(greedy, beam, strict=True)]
    assert min(gain) > -1e-12 and max(gain) > 0.01


def test_a_vocabulary_with_fewer_captions_than_asked_for_gives_those() -> None:
    model = make_captioner(vocab_size=5, num_tokens=3)  # two captions: one of the two words
    said = generate(model, make_memory(model, 2), GenerateSettings(method="beam", beams=6, num=6))
    assert [sorted(s.ids for s in own) for own in said] == [[(3,), (4,)]] * 2


@pytest.mark.parametrize(
    "settings",
    [
        GenerateSettings(),
        GenerateSettings(method="beam", num=2),
        GenerateSettings(method="sample", num=3),
    ],
)
def test_a_caption_does_not_depend_on_the_batch(settings: GenerateSettings) -> None:
    model = make_captioner(end=5.0)
    memory_BSD, uniform_BNL = make_memory(model), uniform(12, settings.num, 8)
    together = generate(model, memory_BSD, settings, uniform_BNL)
    order = [5, 2, 11, 2]
    some = generate(model, memory_BSD[order], settings, uniform_BNL[order])
    alone = [
        generate(model, memory_BSD[b : b + 1], settings, uniform_BNL[b : b + 1])[0] for b in order
    ]
    for found in (some, alone):
        assert [[s.ids for s in own] for own in found] == [
            [s.ids for s in together[b]] for b in order
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.7},
    ],
)
def test_words_are_drawn_as_often_as_the_softmax_says(cut: dict) -> None:
    """The law of the first word and, given the likeliest first, of the second: prefixes of captions
    against products of the softmax.
    """
    model = make_captioner()
    memory_1SD = make_memory(model, 1)
    num = 4000
    said = generate(
        model, memory_1SD, GenerateSettings(method="sample", num=num, **cut), uniform(1, num, 8)
    )[0]
    first = Counter(s.ids[0] for s in said)
    _fits(first, _law(model, memory_1SD, [BOS_ID], ends=False, **cut))
    likeliest = first.most_common(1)[0][0]
    second = Counter(
        (s.ids[1] if len(s.ids) > 1 else EOS_ID) for s in said if s.ids[0] == likeliest
    )
    _fits(second, _law(model, memory_1SD, [BOS_ID, likeliest], ends=True, **cut))


def _law(
    model: Captioner,
    memory_1SD: Tensor,
    beginning: list[int],
    *,
    ends: bool,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> dict[int, float]:
    """Probabilities of the next word, one word at a time from the likeliest down."""
    with torch.no_grad():
        logit = model.logits(model.decode(torch.tensor([beginning]), memory_1SD))[0, -1].tolist()
    words = sorted(range(2 if ends else 3, len(logit)), key=lambda word: -logit[word])[:top_k]
    weight = {word: math.exp(logit[word] / temperature) for word in words}
    total, kept, mass = sum(weight.values()), {}, 0.0
    for word in words:
        if mass < top_p:
            kept[word] = weight[word] / total
        mass += weight[word] / total
    return {word: p / sum(kept.values()) for word, p in kept.items()}


def _fits(found: Counter[int], law: dict[int, float]) -> None:
    assert set(found) <= set(law)
    num = sum(found.values())
    often = [word for word, p in law.items() if p * num >= 5]
    rest = num - sum(found[word] for word in often)
    counts, expected = [found[word] for word in often], [law[word] * num for word in often]
    if (rare := num - sum(expected)) > 1e-6:
        counts, expected = [*counts, rest], [*expected, rare]
    else:
        assert rest == 0
    if len(counts) > 1:
        assert chisquare(counts, expected).pvalue > 1e-4


def test_a_draw_at_the_edges_is_a_word_that_may_be_said() -> None:
    log_probability = torch.tensor([[-math.inf, 0.1, 3.0, -math.inf, 2.9]]).expand(4, -1)
    edge = torch.tensor([0.0, 0.999999, 1 - 2**-24, 0.5])
    assert set(draw_words(log_probability, edge).tolist()) <= {1, 2, 4}
    assert draw_words(log_probability, edge, top_p=1e-9).tolist() == [2] * 4
    assert draw_words(log_probability, edge, top_k=1).tolist() == [2] * 4
    assert draw_words(log_probability, edge, temperature=1e-3).tolist() == [2] * 4


def test_nothing_is_said_that_stands_in_no_caption() -> None:
    model = make_captioner()
    with torch.no_grad():
        model.word_head.bias[[PAD_ID, BOS_ID]] += 30
    memory_BSD = make_memory(model)
    for method in ("greedy", "beam", "sample"):
        for own in generate(model, memory_BSD, GenerateSettings(method=method), uniform(12, 1, 8)):
            assert all(word > EOS_ID for s in own for word in s.ids) and 1 <= len(own[0].ids) <= 7


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_length_and_prompt_are_kept_to(method: str) -> None:
    model = make_captioner(end=6.0)
    settings = GenerateSettings(method=method, min_words=3, max_words=4, prompt=(6, 9))
    for own in generate(model, make_memory(model), settings, uniform(12, 1, 5)):
        assert own[0].ids[:2] == (6, 9) and 5 <= len(own[0].ids) <= 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "loud"}, "method"),
        ({"num": 2}, "greedy"),
        ({"method": "beam", "beams": 2, "num": 3}, "beams=2"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"length_penalty": -1.0}, "length_penalty"),
        ({"min_words": 5, "max_words": 4}, "max_words"),
        ({"max_words": 8}, "at most 7"),
        ({"prompt": (3,) * 7}, "at most 6"),
        ({"prompt": (3, 20)}, "3 to 19"),
        ({"prompt": (EOS_ID,)}, "3 to 19"),
        ({"prompt": (4,) * 5, "min_words": 3}, "at most 2"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings: dict, words: str) -> None:
    model = make_captioner()
    with pytest.raises(ConfigError, match=words):
        generate(model, make_memory(model, 1), GenerateSettings(**settings))


def test_a_run_that_has_diverged_says_so_instead_of_a_caption() -> None:
    model = make_captioner()
    with torch.no_grad():
        model.word_head.bias[5] = math.nan
    for method in ("greedy", "beam", "sample"):
        with pytest.raises(CheckpointError, match="diverged"):
            generate(
                model, make_memory(model, 2), GenerateSettings(method=method), uniform(2, 1, 8)
            )


def test_no_images_have_no_captions() -> None:
    model = make_captioner()
    found: list[list[list[Said]]] = [
        generate(model, make_memory(model, 1)[:0], GenerateSettings(method=m), uniform(0, 1, 8))
        for m in ("greedy", "beam", "sample")
    ]
    assert found == [[], [], []]

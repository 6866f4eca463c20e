"""The route through a model: what it says, what it refuses, that it is never out of date, and that
nothing is left behind.
"""

import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import zoo
import zoo_layers
import zoo_tokens
from per_record_loop import clipped_sum_loop, flat
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import KEY, class_losses, make_batch, patches, rows

from dpvision.data.batch import Batch
from dpvision.dp import matrix_rules
from dpvision.dp.clip import clipped_sum
from dpvision.dp.route import make_route
from dpvision.errors import PrivacyError


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return build()


def check_equal(model, loss_fn, batch) -> None:
    """The sum is that of the slow loop; everything in float64."""
    total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.2)
    expected, norms, _ = clipped_sum_loop(loss_fn, model, batch, KEY, 0.2)
    assert total.grads.keys() == expected.keys()
    assert (flat(total.grads) - flat(expected)).norm() <= 1e-12 * len(norms)
    torch.testing.assert_close(
        total.norms_B.double(), torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("member", "uses"),
    [
        (zoo.ZOO["tied"], {"down.weight": ["linear", "linear", "linear"], "up.bias": ["bias"]}),
        (zoo.ZOO["reused"], {"step.weight": ["linear"] * 3, "step.bias": ["bias"] * 3}),
        (zoo.ZOO["bare"], {"token": ["broadcast"], "scale": ["broadcast"]}),
        (zoo.ZOO["frozen"], {"unused": [], "body.2.bias": ["bias"], "body.0.weight": ["linear"]}),
        (zoo_layers.LAYERS["conv_gram"], {"0.weight": ["convolution"], "0.bias": ["bias"]}),
        (
            zoo_tokens.TOKENS["captioner_chunked_tied"],
            {"embedding.weight": ["embedding", "vocabulary head"]},
        ),
        (
            zoo_tokens.TOKENS["attention_batch_first"],
            {"attention.in_proj_weight": ["linear"], "attention.out_proj.bias": ["bias"]},
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_route_names_every_use(member, uses, device):
    build, loss_fn = member
    with torch.device(device):
        model = build()
    batch = make_batch(2)
    route = make_route(
        loss_fn, model, Batch._make(None if t is None else t.to(device) for t in batch), KEY
    )
    assert route.slow == {} and {name: route.uses[name] for name in uses} == uses
    assert set(route.uses) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_gram_matrices_of_logits_come_from_the_product_whose_error_is_bounded(monkeypatch):
    """One product of all words would round more than ``gram._roundings`` says."""
    seen: list[torch.Size] = []
    bounded = matrix_rules.product
    monkeypatch.setattr(matrix_rules, "product", lambda a, b: seen.append(a.shape) or bounded(a, b))
    build, loss_fn = zoo_tokens.TOKENS["captioner_chunked_bias"]
    model, batch = seeded(build).double(), make_batch(4, dtype=torch.float64)
    clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.2)
    assert {shape[2] for shape in seen} == {zoo_tokens.VOCABULARY}


def test_what_has_no_rule_is_slow_and_says_why():
    route = make_route(class_losses, seeded(zoo.WithoutRule), make_batch(2), KEY)
    assert set(route.slow) == {"mixer", "form.weight", "form.bias", "token"}
    assert "einsum" in route.slow["mixer"] and "bilinear" in route.slow["form.weight"]
    assert route.uses["head.weight"] == ["linear"]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.body, self.head, self.reentrant = (
            nn.Linear(192, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 5),
            reentrant,
        )

    def forward(self, x):
        x = self.stem(x.flatten(1))
        return self.head(
            checkpoint(lambda x: torch.tanh(self.body(x)), x, use_reentrant=self.reentrant)
        )


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_refused(reentrant):
    model = seeded(lambda: Checkpointed(reentrant=reentrant))
    with pytest.raises(PrivacyError, match=r"checkpoints activations.*Switch it off"):
        clipped_sum(class_losses, model, make_batch(3), KEY, max_grad_norm=0.1)
    assert all(p.grad is None for p in model.parameters()), "something is left behind"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(12, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.body(patches(x))[0].mean(1))


def test_a_recurrent_layer_is_refused_or_right():
    model, batch = seeded(Recurrent).double(), make_batch(4, dtype=torch.float64)
    try:
        check_equal(model, class_losses, batch)
    except PrivacyError as error:
        assert "body.weight_ih_l0 (used by lstm)" in str(error) and "Freeze" in str(error)


class CountsRecords(nn.Module):
    """Takes another way for a large batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(192, 5)

    def forward(self, x):
        return self.body(x.flatten(1)) if len(x) < 3 else torch.tanh(self.body(x.flatten(1)))


class LoopsOverRecords(CountsRecords):
    def forward(self, x):
        return torch.stack([self.body(one.flatten()) for one in x])


class LaterWay(CountsRecords):
    """Three and six records as two, but another way for seven."""

    def forward(self, x):
        return self.body(x.flatten(1)) if len(x) < 7 else torch.tanh(self.body(x.flatten(1)))


@pytest.mark.parametrize("build", [CountsRecords, LoopsOverRecords, LaterWay])
def test_what_cannot_be_followed_is_refused_with_a_remedy(build):
    with pytest.raises(
        PrivacyError, match=r"^clip: .*; expected .*\. (Use|Replace|Write|Take|Leave|Freeze)"
    ):
        clipped_sum(class_losses, seeded(build), make_batch(7), KEY, max_grad_norm=0.1)


def packed(model, batch, key):
    """Only a record's first tokens, as many as its label says, in rows of one matrix."""
    x = patches(batch.image_BVCHW[:, 0])
    mask_BL = torch.arange(16) <= batch.label_B[:, None]
    y = torch.zeros(*x.shape[:2], 5, dtype=x.dtype).masked_scatter(
        mask_BL[..., None], model(x[mask_BL])
    )
    return F.cross_entropy(y.mean(1), batch.label_B, reduction="none")


def longest_first(model, batch, key):
    """Records in the order of their brightness within the network."""
    x = batch.image_BVCHW[:, 0].flatten(1)
    order = x.sum(1).argsort()
    y = model[1](torch.tanh(model[0](x[order]))[order.argsort()])
    return F.cross_entropy(y, batch.label_B, reduction="none")


def longest_first_by_gather(model, batch, key):
    x = batch.image_BVCHW[:, 0].flatten(1)
    order = x.sum(1).sort().indices
    inner = torch.tanh(model[0](x.gather(0, order[:, None].expand_as(x))))
    return F.cross_entropy(
        model[1](inner.index_select(0, order.argsort())), batch.label_B, reduction="none"
    )


@pytest.mark.parametrize("loss_fn", [packed, longest_first, longest_first_by_gather])
def test_rows_placed_by_the_data_are_refused_or_right(loss_fn):
    """Also where the number of rows happens to be that of equal records."""
    model = seeded(
        lambda: (
            nn.Linear(12, 5)
            if loss_fn is packed
            else nn.Sequential(nn.Linear(192, 8), nn.Linear(8, 5))
        )
    ).double()
    for labels in ([1, 0, 2, 1], [1, 1, 1, 1], [4, 0, 2, 3]):
        batch = make_batch(4, dtype=torch.float64)._replace(label_B=torch.tensor(labels))
        try:
            check_equal(model, loss_fn, batch)
        except PrivacyError as error:
            assert "expected" in str(error)


def with_gradient_penalty(model, batch, key):
    with torch.enable_grad():
        x = batch.image_BVCHW[:, 0].clone().requires_grad_()
        y = model(x)
        (g,) = torch.autograd.grad(y.logsumexp(1).sum(), x, create_graph=True)
        return F.cross_entropy(y, batch.label_B, reduction="none") + g.flatten(1).square().sum(1)


def test_a_gradient_taken_inside_the_loss_is_refused_or_right():
    """Its backward pass meets the rules a first time, before that of the losses."""
    model = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 5))
    ).double()
    try:
        check_equal(model, with_gradient_penalty, make_batch(4, dtype=torch.float64))
    except PrivacyError as error:
        assert "gradient" in str(error)


def test_a_thawed_and_a_frozen_parameter_are_noticed():
    model = seeded(zoo.Frozen).double()
    batch = make_batch(4, dtype=torch.float64)
    for name in ("body.0.bias", "body.2.weight"):
        check_equal(model, class_losses, batch)
        model.get_parameter(name).requires_grad_(True)
    check_equal(model, class_losses, batch)
    model.get_parameter("body.0.weight").requires_grad_(False)
    check_equal(model, class_losses, batch)


def test_a_replaced_parameter_and_a_new_tie_are_noticed():
    model = seeded(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(192, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
        )
    ).double()
    batch = make_batch(4, dtype=torch.float64)
    check_equal(model, class_losses, batch)
    model[3].weight = nn.Parameter(model[3].weight.detach() * 2)
    check_equal(model, class_losses, batch)
    model[5].weight = model[3].weight
    check_equal(model, class_losses, batch)


def test_train_and_eval_do_not_share_a_route():
    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = nn.Linear(192, 5), nn.Parameter(torch.randn(5))

        def forward(self, x):
            y = self.body(x.flatten(1))
            return (
                y * self.scale
                if self.training
                else (y.reshape(-1, 5) @ torch.diag(self.scale)).cumsum(1)
            )

    model, batch = seeded(TwoWays).double(), make_batch(4, dtype=torch.float64)
    for mode in (True, False, True):
        check_equal(model.train(mode), class_losses, batch)


def made_losses(permutation):
    """One function's code, another order of dimensions: the calls and all sizes are the same, the
    records lie elsewhere.
    """

    def losses(model, batch, key):
        x = patches(batch.image_BVCHW[:, 0])[:, :4].permute(
            permutation
        )  # 4 tokens; as many records
        return torch.tanh(model(x)).permute(permutation).square().mean((1, 2))

    return losses


class Method:
    def __init__(self, permutation) -> None:
        self.permutation = permutation

    def losses(self, model, batch, key):
        return made_losses(self.permutation)(model, batch, key)


@pytest.mark.parametrize(
    "make",
    [
        made_losses,
        lambda p: functools.partial(Method.losses, Method(p)),
        lambda p: Method(p).losses,
    ],
)
def test_another_loss_with_the_same_code_and_shapes_has_its_own_route(make):
    model, batch = seeded(lambda: nn.Linear(12, 5)).double(), make_batch(4, dtype=torch.float64)
    for permutation in ((0, 1, 2), (1, 0, 2), (0, 1, 2)):
        check_equal(model, make(permutation), batch)


def test_a_changed_setting_of_the_model_is_noticed_or_refused():
    class Turning(nn.Module):
        permutation = (0, 1, 2)

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(12, 5)

        def forward(self, x):
            return (
                torch.tanh(self.body(patches(x)[:, :4].permute(self.permutation)))
                .permute(self.permutation)
                .mean(1)
            )

    model, batch = seeded(Turning).double(), make_batch(4, dtype=torch.float64)
    check_equal(model, class_losses, batch)
    model.permutation = (1, 0, 2)
    try:
        check_equal(model, class_losses, batch)
    except PrivacyError as error:
        assert "expected" in str(error)


def test_losses_of_one_model_do_not_disturb_one_another():
    model, batch = seeded(zoo_tokens.Captioner).double(), make_batch(5, dtype=torch.float64)
    for loss_fn in (
        zoo_tokens.token_losses,
        zoo_tokens.chunked_token_losses,
        zoo_tokens.token_losses,
    ):
        check_equal(model, loss_fn, batch)
        check_equal(model, loss_fn, rows(batch, [2]))


def test_negative_indices_count_from_the_end():
    table = nn.Embedding(10, 4).double()

    def losses(model, batch, key):
        index_BT = batch.image_BVCHW[:, 0, 0, 0].abs().mul(10).long().clamp(max=9) - 10
        return model.weight[index_BT].square().sum((1, 2))

    check_equal(table, losses, make_batch(5, dtype=torch.float64))


@pytest.mark.parametrize("bound", [False, True])
def test_the_model_can_be_forgotten(bound):
    """Routes are remembered by model; they do not keep it, nor does a loss function that holds
    it.
    """
    model = seeded(zoo.Tied)
    loss_fn = (
        functools.partial(lambda held, model, batch, key: class_losses(held, batch, key), model)
        if bound
        else class_losses
    )
    # The check gives the loss a copy of the model, which this one does not use.
    clipped_sum(loss_fn, model, make_batch(3), KEY, max_grad_norm=0.1, check_separability=not bound)
    ref = weakref.ref(model)
    del model, loss_fn
    gc.collect()
    assert ref() is None


def test_the_backward_pass_leaves_no_graph_behind():
    """Activations are freed: what the call returns hangs on nothing."""
    total = clipped_sum(class_losses, seeded(zoo.Reused), make_batch(3), KEY, max_grad_norm=0.1)
    for value in (*total.grads.values(), total.norms_B, total.losses_B):
        assert value.grad_fn is None and not value.requires_grad


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_it_works_under_no_grad_and_leaves_the_setting(grad_enabled):
    model, batch = seeded(zoo.Bare).double(), make_batch(3, dtype=torch.float64)
    with torch.set_grad_enabled(grad_enabled):
        total = clipped_sum(class_losses, model, batch, KEY, max_grad_norm=0.2)
        assert torch.is_grad_enabled() == grad_enabled
    assert (
        flat(total.grads) - flat(clipped_sum_loop(class_losses, model, batch, KEY, 0.2)[0])
    ).norm() <= 1e-12

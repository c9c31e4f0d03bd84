"""An op is taken for one that was seen before only where it takes the same."""

from __future__ import annotations

import random
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from elbowroom.hooks import sightings
from elbowroom.hooks.estimates import Estimates
from elbowroom.hooks.kinds import find_kind
from elbowroom.hooks.sightings import MOST_AFTER, Order, Sighting
from elbowroom.quick import library

aten = torch.ops.aten


told_by: Any = sightings
"""Whose classes are tested: those in Python, or the library's."""


@pytest.fixture(autouse=True, params=["python", "library"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.load() if request.param == "library" else sightings
    if loaded is None:
        pytest.skip("the library has not been built: elbowroom build")
    monkeypatch.setattr(sys.modules[__name__], "told_by", loaded)


def see(func: Any, *args: Any, **kwargs: Any) -> Sighting[str]:
    return told_by.Sighting(find_kind(func), (*args, *kwargs.values()), kwargs, "seen")


def is_again(seen: Sighting[str], *args: Any, **kwargs: Any) -> bool:
    return seen.is_again((*args, *kwargs.values()), kwargs)


X = torch.randn(4, 6)


@pytest.mark.parametrize(
    "other",
    [
        *(torch.randn(4, 5), torch.randn(4, 6, 1), torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2], X.double()),
        *(torch.randn(1, 6).expand(4, 6), nn.Parameter(X), X.clone().requires_grad_(), X.to("meta"), X.to_sparse()),
        *(torch.empty_like(X, device="meta"), 2.0, None, [1]),
    ],
)
def test_other_tensors(other: Any) -> None:
    seen = see(aten.relu.default, X)
    assert seen.is_certain
    assert is_again(seen, torch.randn(4, 6))
    assert not is_again(seen, other)


def test_conjugates_are_others() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    seen = see(aten.mul.Tensor, x, x.clone())
    assert is_again(seen, x.clone(), x)
    assert not is_again(seen, x, x.conj())
    assert not is_again(seen, x, torch._neg_view(x))


def test_other_scalars() -> None:
    numbers = torch.ones(4, dtype=torch.int8)
    seen = see(aten.mul.Scalar, numbers, 1)
    assert is_again(seen, numbers, 1)
    for other in (2, 1.0, True, 1j, X):  # 1 * int8 is int8, 1.0 * int8 is float32
        assert not is_again(seen, numbers, other)
    reduced = see(aten.sum.dim_IntList, X, [0], True)
    assert is_again(reduced, X, [0], True)
    assert not is_again(reduced, X, [0], False)
    assert not is_again(reduced, X, [1], True)
    assert not is_again(reduced, X, [0, 1], True)
    assert not is_again(reduced, X, [0])
    norm = see(aten.native_layer_norm.default, X, [6], None, None, 1e-5)
    assert is_again(norm, X, [6], None, None, 1e-5)
    assert not is_again(norm, X, [6], torch.ones(6), None, 1e-5)
    assert not is_again(norm, X, [6], None, None, 1e-6)


def test_a_learning_rate_may_change() -> None:
    """As it does in every step of Adam; but what an op does to a number of another type is another thing."""
    seen = see(aten.addcdiv_.default, X, X.clone(), X.clone(), value=-0.1)
    assert is_again(seen, X, X.clone(), X.clone(), value=-0.2)
    assert not is_again(seen, X, X.clone(), X.clone(), value=1)
    assert not is_again(see(aten.mul.Scalar, X, 0.1), X, 0.2)  # no op in place


@pytest.mark.parametrize(
    ("schema", "one", "other"), [("Any", 1, 1.0), ("Scalar?[]", [1], [1.0]), ("Scalar[]", [1], [1.0])]
)
def test_arguments_of_several_types(schema: str, one: Any, other: Any) -> None:
    name = (
        f"several_{told_by.__name__.rpartition('.')[2]}_"
        + schema.replace("?", "_or_none").replace("[]", "_list").lower()
    )
    torch.library.define(f"elbowroom_test::{name}", f"(Tensor x, {schema} y) -> Tensor")
    seen = see(getattr(torch.ops.elbowroom_test, name).default, X, one)
    assert not (seen.is_certain and is_again(seen, X, other))


def test_a_list_that_changes_later() -> None:
    sizes = [0]
    seen = see(aten.sum.dim_IntList, X, sizes)
    sizes[0] = 1
    assert is_again(seen, X, [0])
    assert not is_again(seen, X, [1])


def test_other_names() -> None:
    bias, w = torch.randn(5), torch.randn(6, 5)
    seen = see(aten.addmm.default, bias, X, w, beta=0.5)
    assert is_again(seen, bias, X, w, beta=0.5)
    for other in ({"alpha": 0.5}, {"beta": 1}, {"beta": 0.5, "alpha": 0.5}, {}):
        assert not is_again(seen, bias, X, w, **other)
    assert not is_again(see(aten.addmm.default, bias, X, w), bias, X, w, beta=0.5)
    into = see(aten.relu.out, X, out=X.clone())
    assert is_again(into, X, out=X.clone())
    assert not into.is_again((X, X.clone()), ())
    cast = see(aten._to_copy.default, X, dtype=torch.float64)
    assert is_again(cast, X, dtype=torch.float64)
    assert not is_again(cast, X, dtype=torch.float16)


def test_other_settings() -> None:
    seen = see(aten.relu.default, X)
    torch.set_default_dtype(torch.float64)
    try:
        assert not is_again(seen, X)
    finally:
        torch.set_default_dtype(torch.float32)
    image, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    args = (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    convolved = see(aten.convolution.default, *args)
    assert is_again(convolved, *args)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not is_again(convolved, *args)


def test_what_cannot_be_told() -> None:
    if told_by is sightings:  # PyTorch's test takes each tensor once, and one at the least
        assert not see(aten.mul.Tensor, X, X).is_certain
        assert not see(aten.empty.memory_format, [4]).is_certain
    assert not see(aten.cat.default, [X, X.clone()]).is_certain
    assert not see(aten.index.Tensor, X, [torch.tensor([1])]).is_certain
    assert not see(aten.cat.default, (X, X.clone())).is_certain
    assert not see(aten.bernoulli_.float, X, 0.5, generator=torch.Generator()).is_certain


def test_nothing_that_an_op_was_given_is_kept() -> None:
    x, many = torch.randn(5), [torch.randn(5), torch.randn(5)]
    gone = [weakref.ref(each) for each in (x, *many)]
    known = Estimates("cpu", told_by)
    for _ in range(2):
        known.find(aten.cat.default, (many,), {})
        known.find(aten.addcmul.default, (x, many[0], many[1]), {"value": 2})
        known.find(aten.index.Tensor, (x, [torch.tensor([1])]), {})
    del x, many
    assert [find() for find in gone] == [None] * 3


def test_what_came_next_is_expected() -> None:
    order: Order[str] = told_by.Order()
    relu, exp = find_kind(aten.relu.default), find_kind(aten.exp.default)
    first, second = told_by.Sighting(relu, (X,), (), "first"), told_by.Sighting(exp, (X,), (), "second")
    assert order.expect(relu, (X,), ()) is None
    for sighting in (first, second, first):
        order.follow(sighting)
    assert order.expect(relu, (X,), ()) is None  # the last one was a relu
    assert [order.expect(exp, (X,), ()), order.expect(relu, (X,), ())] == ["second", "first"]
    for size in range(2 * MOST_AFTER):
        order.follow(told_by.Sighting(exp, (torch.randn(size),), (), "another"))
        order.follow(first)
    assert len(first.after) <= MOST_AFTER


def test_without_pytorchs_test_nothing_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "told_by", sightings)  # the library needs none
    monkeypatch.setattr(sightings, "TensorGuards", None)
    assert not see(aten.relu.default, X).is_certain
    known = Estimates("cpu", told_by)
    assert known.find(aten.relu.default, (X,), {}) is known.find(aten.relu.default, (X.clone(),), {})


def test_estimates_are_those_of_the_op_itself() -> None:
    """Whatever came before. Half of the ops come in an order that recurs."""
    draw = random.Random(5)

    def make() -> torch.Tensor:
        x = torch.randn(draw.choice((1, 3)), draw.choice((4, 5)))
        x = draw.choice((x, x.double(), nn.Parameter(x), x.t().contiguous().t(), x[:, ::2], x > 0, x.to(torch.int8)))
        return x.expand(2, *x.shape) if draw.random() < 0.1 else x

    def draw_op() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        x, number = make(), draw.choice((1, 1.0, True, 3))
        return draw.choice(
            [
                (aten.mul.Scalar, (x, number), {}),
                (aten.mul.Tensor, (x, draw.choice((x, make()[..., :1]))), {}),
                (aten.add.Scalar, (x, 1), {"alpha": 1} if draw.random() < 0.5 else {}),
                (aten.sum.dim_IntList, (x, [draw.choice((0, 1))], draw.random() < 0.5), {}),
                (aten._to_copy.default, (x,), {"dtype": draw.choice((torch.float64, torch.int8))}),
                (aten.cat.default, ([x, x],), {}),
                (aten.exp.default, (x,), {}),
                (aten.zeros_like.default, (x,), {}),
            ]
        )

    loop = [draw_op() for _ in range(50)]
    expected: list[Any] = []

    class Counted:
        order = told_by.Order()
        follow = order.follow

        def expect(self, *args: Any) -> Any:
            expected.append(found := self.order.expect(*args))
            return found

    known = Estimates("cpu", told_by)
    known._order = Counted()  # type: ignore[assignment]
    for _ in range(40):
        for op in loop if draw.random() < 0.5 else [draw_op() for _ in range(20)]:
            found = known.find(*op)
            fresh = Estimates("cpu", told_by).find(*op)
            assert (found.result_bytes, found.inner_bytes) == (fresh.result_bytes, fresh.inner_bytes), op
    assert sum(each is not None for each in expected) > len(expected) / 4

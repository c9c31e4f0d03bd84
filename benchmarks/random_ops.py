"""Instructions of which random programs are made, for `random_programs.py`.

An instruction takes a `State` and changes its pool of tensors. What it does rests on the state's random numbers alone,
so a program does the same each time.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 96, 48

Instruction = Callable[["State"], None]


class Model(nn.Module):
    """Parameters that the instructions use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True)
        self.embedding = nn.Embedding(17, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear[0](x)


class State:
    """The tensors of a program that runs. All have ROWS x WIDTH elements and a gradient.

    Args:
        model: has the parameters.
        seed: of the choices.
        step: which step it is; inputs rest on it.
    """

    def __init__(self, model: Model, seed: int, step: int) -> None:
        self.model, self.random = model, random.Random(seed)
        torch.manual_seed(1000 * seed + step)
        self.pool = [model(torch.randn(ROWS, WIDTH))]
        self.constants = [torch.rand(ROWS, WIDTH)]
        self.shown: list[torch.Tensor] = []  # to NumPy before they were used

    def pick(self) -> torch.Tensor:
        """A tensor of the pool."""
        return self.random.choice(self.pool)

    def put(self, value: torch.Tensor) -> None:
        """Add a tensor, or replace one, whose graph alone holds it from then on."""
        value = value.reshape(ROWS, WIDTH)
        if len(self.pool) < 4:
            self.pool.append(value)
        else:
            self.pool[self.random.randrange(len(self.pool))] = value


class Twist(torch.autograd.Function):
    """Saves an input, an output and something between them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        between = x * y
        made = between.sin()
        ctx.save_for_backward(x, y, between, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, between, made = ctx.saved_tensors
        inner = gradient * between.cos() + 0.01 * made
        return inner * y, inner * x


UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    *(torch.sin, torch.tanh, torch.sigmoid, functional.gelu, functional.silu, torch.relu, torch.square),
    *(lambda x: torch.softmax(x, 1), lambda x: functional.layer_norm(x, (WIDTH,)), lambda x: torch.cumsum(x, 0)),
    *(lambda x: x.sort(1).values, lambda x: x / (1 + x.norm(dim=1, keepdim=True)), lambda x: x.clamp(-1, 1)),
    *(lambda x: torch.fft.ifft(torch.fft.fft(x)).real, lambda x: x.prod(1, keepdim=True).tanh() + x),
    *(lambda x: x.double().exp().float().clamp(max=9), lambda x: x.logsumexp(0, keepdim=True) - x),
    *(lambda x: torch.cat([x[::2], x[1::2]]), lambda x: x.roll(3, 0), lambda x: x.t().contiguous().t().tanh()),
    *(lambda x: functional.dropout(x, 0.3), lambda x: x.unfold(1, 2, 2).flip(2).tanh()),
)
BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    *(torch.add, torch.mul, torch.maximum, lambda x, y: torch.where(x > y, x.tanh(), y.sin())),
    *(lambda x, y: Twist.apply(x, y), lambda x, y: torch.einsum("ij,kj,kl->il", x, y, y).tanh()),
    *(lambda x, y: torch.bmm(x.view(8, 12, WIDTH), y.view(8, 12, WIDTH).mT).tanh() @ x.view(8, 12, WIDTH),),
    *(lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.addmm(x, y.softmax(1), (x.mT @ y).tanh())),
    *(lambda x, y: functional.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]),),
)


def apply_one(state: State) -> None:
    state.put(state.random.choice(UNARY)(state.pick()))


def apply_two(state: State) -> None:
    state.put(state.random.choice(BINARY)(state.pick(), state.pick()))


def apply_linear(state: State) -> None:
    state.put(torch.tanh(state.random.choice(list(state.model.linear))(state.pick())))


def convolve(state: State) -> None:
    state.put(state.model.convolution(state.pick()[None, None]).relu().mean(1))


def normalize(state: State) -> None:
    state.put(state.model.norm(state.pick()))


def recur(state: State) -> None:
    state.put(state.model.lstm(state.pick().view(8, 12, WIDTH))[0])


def index(state: State) -> None:
    x, places = state.pick(), torch.randint(ROWS, (ROWS,))
    kind = state.random.randrange(6)
    if kind == 0:
        made = x[places]
    elif kind == 1:
        made = torch.zeros(ROWS, WIDTH).index_add(0, places, x)
    elif kind == 2:
        made = torch.zeros(ROWS, WIDTH).scatter_add(0, places[:, None].expand(ROWS, WIDTH), x.sin())
    elif kind == 3:
        made = x.index_put((places[:7],), x[:7].exp().clamp(max=3))
    elif kind == 4:
        made = x.masked_fill(x > 0.5, 0.1) * x[x > 0].mean()
    else:
        made = x * state.model.embedding(places % 17)
    state.put(made)


def write_to_view(state: State) -> None:
    x = state.pick() * 1.25
    part = state.random.choice([x[: ROWS // 2], x[:, 3:7], x.t()[::2], x.view(-1)[5:500], x.chunk(3)[1], x])
    how = state.random.randrange(5)
    if how == 0:
        part.mul_(0.5)
    elif how == 1:
        part.copy_(part.detach().cos())
    elif how == 2:
        part.add_(part.sin())
    elif how == 3:
        part.tanh_()
    else:
        part.zero_()
    state.put(x.sin())


def write_to_data(state: State) -> None:
    """What autograd has saved is written to, and no version tells."""
    x = state.pick()
    y = x.sin()
    (x if state.random.random() < 0.5 else y).data.mul_(0.9)
    state.put(y * x)


def write_out(state: State) -> None:
    out = torch.empty(0) if state.random.random() < 0.5 else state.random.choice(state.constants)
    with torch.no_grad():
        torch.mul(state.pick(), 0.5, out=out)
    state.constants = [*state.constants[-1:], out]
    state.put(state.pick() + 0.1 * out.detach().clone().sin())


def use_constant(state: State) -> None:
    state.put(state.pick() * state.random.choice(state.constants).detach().clone())


def compute_without_gradient(state: State) -> None:
    with torch.no_grad() if state.random.random() < 0.5 else torch.inference_mode():
        made = state.model(state.pick().detach()).tanh().sin()
    state.put(state.pick() * made.clone())


def resize(state: State) -> None:
    other = state.pick().detach().clone()
    state.put(state.pick() + other.mean())
    other.resize_(2 * ROWS, WIDTH).fill_(0.25)
    state.put(state.pick() * other[:ROWS])


def recompute(state: State) -> None:
    chosen = [state.random.choice(UNARY) for _ in range(3)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for each in chosen:
            x = each(x).reshape(ROWS, WIDTH)
        return state.model.linear[1](x)

    state.put(checkpoint(run, state.pick(), use_reentrant=state.random.random() < 0.4))


def hook(state: State) -> None:
    made = state.pick() * 1.5
    made.register_hook(lambda gradient: gradient * 0.5)
    state.put(made.sin())


def run_in_thread(state: State) -> None:
    chosen, x, found = state.random.choice(UNARY), state.pick(), list[Any]()

    def run() -> None:
        try:
            found.append(chosen(x))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    state.put(found[0])


def differentiate_now(state: State) -> None:
    x = state.pick()
    weight = state.model.linear[0].weight
    (gradient,) = torch.autograd.grad(x.square().mean(), weight, create_graph=True, allow_unused=True)
    if gradient is not None:
        state.put(state.pick() + gradient.square().sum().tanh())


def go_back_now(state: State) -> None:
    state.pick().mean().backward(retain_graph=True)


def pack_by_hooks(state: State) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        state.put(state.pick().sin().exp().clamp(max=4))


def save_on_cpu(state: State) -> None:
    with torch.autograd.graph.save_on_cpu():
        state.put(functional.gelu(state.model.linear[2](state.pick())))


def compute_in_half(state: State) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        made = state.model.linear[1](state.pick())
    state.put(made.float().tanh())


def fail(state: State) -> None:
    with contextlib.suppress(RuntimeError):
        state.pick() @ torch.ones(3, 3)
    with contextlib.suppress(RuntimeError):
        state.constants[0].detach().clone().add_(torch.ones(7))


def alias_by_numpy(state: State) -> None:
    batch = torch.rand(ROWS, WIDTH)
    array = batch.numpy()
    made = (state.pick() * batch).sin() * batch.cos()
    array[: ROWS // 2] *= 0.5
    state.shown.append(batch)
    state.put(made)


def forget(state: State) -> None:
    if len(state.pool) > 1:
        state.pool.pop(state.random.randrange(len(state.pool)))
    if state.random.random() < 0.2:
        gc.collect()


USUAL: tuple[Instruction, ...] = (apply_one, apply_two, apply_linear)
UNUSUAL: tuple[Instruction, ...] = (
    *(
        convolve,
        normalize,
        recur,
        index,
        write_to_view,
        write_to_data,
        write_out,
        use_constant,
        resize,
        recompute,
        hook,
    ),
    *(compute_without_gradient, run_in_thread, differentiate_now, go_back_now, pack_by_hooks, save_on_cpu, forget),
    *(compute_in_half, fail, alias_by_numpy),
)


def write_program(seed: int) -> list[Instruction]:
    """Choose the instructions of a program."""
    choices = random.Random(seed)
    return [
        choices.choice(USUAL if choices.random() < 0.5 else UNUSUAL) for _ in range(choices.randrange(6, 26))
    ]  # fmt: skip


def run_program(model: Model, instructions: list[Instruction], seed: int, step: int) -> torch.Tensor:
    """Run a program forward and backward; its loss."""
    state = State(model, seed, step)
    for each in instructions:
        each(state)
    loss = sum((each.mean() for each in state.pool), torch.zeros(()))
    shown = state.shown
    del state
    loss.backward()
    shown.clear()
    return loss.detach()

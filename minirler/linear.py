"""Products x @ W.T whose rows have the same bits whatever else is in the batch.

A library adds up a row in an order that depends on how many rows there are: the last few, which
fill no vector, go through other code, and where the work is split over threads there are more of
those. Sampler and trainer see a token in batches of other heights, so that their log-probs differ
in the last bits. In a deterministic run a product is made in pieces of at most `most` rows, each
filled up to a multiple of `multiple`. That leaves few heights, and `make_invariant_` tries them
all before the run starts: on one kind of CPU the bits change below 8 rows, on another everywhere.

`rows` is () for the plain product, else (multiple, most). The heights of each of CANDIDATES are
among those of the ones before it, so which one is taken changes the speed, never a bit.

Not here: gradients. They are plain products.

Shapes: N packed tokens, d inputs, e outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLAIN: tuple[int, ...] = ()
CANDIDATES = ((8, 512), (32, 512), (32, 32))  # the fastest first
TEST_SIZE = 1 << 33  # multiply-adds after which the test of one matrix skips heights


class Linear(nn.Linear):
    """nn.Linear that keeps to `rows`, which `set_rows_` sets, and may have an adapter (`lora`)."""

    rows = PLAIN

    def __init__(self, *sizes: int, bias: bool = True):
        super().__init__(*sizes, bias=bias)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [N, d] -> [N, e]."""
        if not self.rows:
            out = F.linear(x, self.weight, self.bias)  # adds the bias in the product
        else:
            out = linear(x, self.weight, self.rows)
            out = out if self.bias is None else out + self.bias
        return out if self.adapter is None else out + self.adapter(x, self.rows)


def linear(x: Tensor, weight: Tensor, rows: tuple[int, ...] = PLAIN) -> Tensor:
    """`product`, differentiable."""
    if rows and torch.is_grad_enabled():
        return InPieces.apply(x, weight, rows)
    return product(x, weight, rows)


class InPieces(torch.autograd.Function):
    """`product` with its gradient."""

    @staticmethod
    def forward(ctx, x, weight, rows):
        """x [N, d], weight [e, d] -> [N, e]."""
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return product(x, weight, rows)

    @staticmethod
    def backward(ctx, grad):
        """Gradients of x and weight, where they are wanted."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_x = product(grad, weight.T, ctx.rows) if wants_x else None
        return grad_x, grad.T @ x if wants_weight else None, None


def product(x: Tensor, weight: Tensor, rows: tuple[int, ...] = PLAIN) -> Tensor:
    """x [N, d] @ weight [e, d].T -> [N, e], in the heights that `rows` allows; no gradient."""
    count = len(x)
    multiple, most = rows or (1, count)
    spare = -count % multiple
    if count + spare <= most:
        x = F.pad(x, (0, 0, 0, spare)) if spare else x
        return F.linear(x, weight)[:count]
    out = x.new_empty(count, len(weight))
    for piece, place in zip(x.split(most), out.split(most), strict=True):
        if len(piece) % multiple:
            place.copy_(product(piece, weight, rows))
        else:
            torch.mm(piece, weight.T, out=place)
    return out


def make_invariant_(models: list[nn.Module], num_valid: int | None = None) -> tuple[int, int]:
    """Let each `Qwen3` of one size keep to the first of CANDIDATES that changes no bit; returns it.

    Tried with one weight of each shape, the head's first `num_valid` rows, and torch's present
    number of threads. ValueError where none will do.
    """
    head = models[0].head_weight()[:num_valid]
    weights = [p for layer in models[0].modules() if isinstance(layer, Linear)
               for p in layer.parameters() if p.dim() == 2]  # with those of an adapter
    weights = [weight.detach().to(head.dtype) for weight in (*weights, head)]
    weights = list({weight.shape: weight for weight in weights}.values())
    for rows in CANDIDATES:
        if all(is_invariant(weight, *rows) for weight in weights):
            for model in models:
                set_rows_(model, rows)
            return rows
    raise ValueError("this machine's matrix products depend on the batch in each way that was tried"
                     f" {CANDIDATES}: set train.deterministic=false")  # fmt: skip


def set_rows_(model: nn.Module, rows: tuple[int, ...]) -> None:
    """Let every product of a `Qwen3` keep to `rows`, its head's included."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.rows = rows
    model.rows = rows


def is_invariant(weight: Tensor, multiple: int, most: int) -> bool:
    """Whether rows have the same bits at each height, wherever they stand in a piece.

    Random rows; those of a piece of `most` are held against all others. Matrices for which that
    would take long are tried at the smallest heights and at a share of the others.
    """
    draw = torch.Generator().manual_seed(0)  # its own: a run's generator must not move
    x = torch.randn(2 * most, weight.shape[1], generator=draw).to(weight)  # [2 * most, d]
    rows = multiple, most
    wanted = product(x, weight, rows)
    heights = range(multiple, most + 1, multiple)
    skip = max(1, sum(heights) * weight.numel() // TEST_SIZE)
    for height in [*heights[:4], *heights[4::skip]]:
        start = int(torch.randint(2 * most - height + 1, (), generator=draw))
        piece = slice(start, start + height)
        if not torch.equal(product(x[piece].clone(), weight, rows), wanted[piece]):
            return False
    return True

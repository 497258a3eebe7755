"""The numerical operations that are worth a kernel of their own.

Trainer and sampler both go through this file, so that a log-prob, a random draw or an advantage has
one definition: float32 whatever the model computes in, the tempered *full* softmax over the first
`num_valid` vocabulary entries (the rows beyond are padding that no tokenizer can name), and noise
that depends on nothing but its key and counter.

Arguments are checked here; kernels compute (`kernels`), or plain torch (`ops_ref`). Attention and
its cache stand in `attention`, products of whole batches in `linear`.

    python -m minirler.ops        one line an op with the backend that runs it

Shapes: N packed tokens, B rows, V vocabulary, d width, R rollouts, P groups.
"""

import numpy as np
import torch
from torch import Tensor
from torch.library import custom_op

from . import ops_ref as ref
from .attention import kv_copy_, kv_write_, packed_attention, paged_attention
from .kernels import DTYPES, backend, contiguous, in_rows, is_native, launch
from .linear import product
from .noise import gumbel_noise

NORMALIZE = {"none": 0, "std": 1, "std1": 2}
HEAD_ROWS = 16384  # of the head's gradient at once, where the product cannot be added in place


def logprob(logits, targets, mask=None, temperature=1.0, num_valid=None, reuse=False):
    """(log-prob of each target, entropy, logsumexp of its row), float32 [N]; the first with grad.

    logits [N, V] of any float dtype (-inf is a token that cannot be drawn), targets [N] int64 below
    `num_valid` (default V), mask [N] bool. All are those of softmax(logits[:, :num_valid] /
    temperature), and 0 where mask is False, with a gradient of exactly 0, whatever stands there.
    `reuse`: the backward pass writes the gradient over the logits, where nobody needs them later.
    ValueError: shapes, dtypes, a target out of range, a temperature that is not above 0.
    """
    num_valid = check_rows(*logits.shape, targets, mask, temperature, num_valid)
    return logprob_op(logits, targets, mask, float(temperature), num_valid, reuse)


@custom_op("minirler::logprob", mutates_args=())
def logprob_op(logits: Tensor, targets: Tensor, mask: Tensor | None, temperature: float,
               num_valid: int, reuse: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`logprob` without the checks."""
    if not is_native(logits):
        return ref.logprob_ref(logits, targets, mask, temperature, num_valid)
    out = three_rows(logits)
    logits, targets, mask = in_rows(logits), targets.contiguous(), contiguous(mask)
    launch("logprob", logits.device, *fields(logits, temperature, num_valid), targets, mask, *out)
    return out


@logprob_op.register_fake
def _(logits, targets, mask, temperature, num_valid, reuse):
    return three_rows(logits)


@custom_op("minirler::logprob_backward", mutates_args=())
def logprob_backward_op(grad_logps: Tensor, logits: Tensor, targets: Tensor, mask: Tensor | None,
                        lse: Tensor, temperature: float, num_valid: int) -> Tensor:  # fmt: skip
    """Gradient of the logits, in their dtype."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return logprob_backward_(grad, grad_logps, logits, targets, mask, lse, temperature, num_valid)


@logprob_backward_op.register_fake
def _(grad_logps, logits, targets, mask, lse, temperature, num_valid):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@custom_op("minirler::logprob_reuse", mutates_args={"logits"})
def logprob_reuse_op(logits: Tensor, grad_logps: Tensor, targets: Tensor, mask: Tensor | None,
                     lse: Tensor, temperature: float, num_valid: int) -> None:  # fmt: skip
    """`logprob_backward_op` into the logits themselves, contiguous."""
    logprob_backward_(logits, grad_logps, logits, targets, mask, lse, temperature, num_valid)


def logprob_backward_(grad, grad_logps, logits, targets, mask, lse, temperature, num_valid):
    """Write the gradient of the logits to `grad`, contiguous, which may be the logits' own."""
    if not is_native(logits):
        arguments = grad_logps, logits, targets, mask, lse, temperature, num_valid
        return grad.copy_(ref.logprob_backward_ref(*arguments))
    logits, targets, mask = in_rows(logits), targets.contiguous(), contiguous(mask)
    launch("logprob_backward", logits.device, *fields(logits, temperature, num_valid), targets,
           mask, lse, grad_logps.contiguous(), grad, grad.shape[1])  # fmt: skip
    return grad


def save_logprob(ctx, inputs, output):
    """What the backward pass of `logprob` needs."""
    logits, targets, mask, *ctx.settings, ctx.reuse = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(logits, targets, mask, output[2])


def backward_of_logprob(ctx, grad_logps, _entropy, _lse):
    """Gradients of the inputs of `logprob`."""
    logits, targets, mask, lse = ctx.saved_tensors
    if ctx.reuse and logits.is_contiguous():
        grad = logits.detach()
        logprob_reuse_op(grad, grad_logps, targets, mask, lse, *ctx.settings)
    else:
        grad = logprob_backward_op(grad_logps, logits, targets, mask, lse, *ctx.settings)
    return grad, None, None, None, None, None


logprob_op.register_autograd(backward_of_logprob, setup_context=save_logprob)


# ------------------------------------------------------------------------------ fused head


def token_logps(hidden, head, targets, mask, temperature=1.0, num_valid=None, chunk=1024, rows=()):
    """`logprob` of the logits hidden @ head.T, of which only `chunk` rows exist at a time.

    hidden [N, d], head [V, d], targets [N] int64, mask [N] bool -> (logps, entropy), float32 [N].
    Rows outside the mask are not computed: results and gradient are exactly 0 there. The backward
    pass computes the logits again, turns them into their gradient in place, and adds up the head's
    gradient in float32. `rows`: see `linear`.
    """
    chunks = check_rows(len(hidden), len(head), targets, mask, temperature, num_valid), chunk, rows
    if hidden.shape[1:] != head.shape[1:] or hidden.dtype != head.dtype or chunk < 1:
        raise ValueError(f"hidden is {hidden.dtype} {list(hidden.shape)}, head {head.dtype} "
                         f"{list(head.shape)}, chunk {chunk}: they do not fit")  # fmt: skip
    return token_logps_op(hidden, head, targets, mask, float(temperature), *chunks)[:2]


@custom_op("minirler::token_logps", mutates_args=())
def token_logps_op(hidden: Tensor, head: Tensor, targets: Tensor, mask: Tensor, temperature: float,
                   num_valid: int, chunk: int, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropy, logsumexp) of `token_logps`."""
    out = tuple(torch.zeros_like(x) for x in three_rows(hidden))
    for part in mask.nonzero()[:, 0].split(chunk):  # synchronises on a GPU: the count shapes work
        results = logprob_op(product(hidden[part], head[:num_valid], rows), targets[part], None,
                             temperature, num_valid, False)  # no name: one chunk's logits exist
        for whole, x in zip(out, results, strict=True):
            whole[part] = x
    return out


@token_logps_op.register_fake
def _(hidden, head, targets, mask, temperature, num_valid, chunk, rows):
    return three_rows(hidden)


@custom_op("minirler::token_logps_backward", mutates_args=())
def token_logps_backward_op(
    grad_logps: Tensor, hidden: Tensor, head: Tensor, targets: Tensor, mask: Tensor, lse: Tensor,
    temperature: float, num_valid: int, chunk: int, rows: list[int], wants_head: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden and head; the latter empty unless it is wanted."""
    grad_hidden = torch.zeros_like(hidden)
    grad_head = torch.zeros(head.shape if wants_head else 0, device=head.device)  # float32
    valid = head[:num_valid]
    for part in mask.nonzero()[:, 0].split(chunk):
        x = hidden[part]  # [chunk, d]
        grad = product(x, valid, rows)  # the logits, and from the next line on their gradient
        logprob_backward_(grad, grad_logps[part], grad, targets[part], None, lse[part], temperature,
                          num_valid)  # fmt: skip
        grad_hidden[part] = add_products_(grad, x, valid, grad_head, rows)
        del grad  # before the next chunk's exists
    return grad_hidden, grad_head.to(head.dtype)


@token_logps_backward_op.register_fake
def _(grad_logps, hidden, head, targets, mask, lse, *settings):
    return torch.empty_like(hidden), head.new_empty(head.shape if settings[-1] else 0)


def add_products_(grad, x, head, grad_head, rows=()):
    """Add grad.T @ x to grad_head, float32 (if it is not empty); returns grad @ head [chunk, d]."""
    if grad.dtype == torch.float32:
        if len(grad_head):
            grad_head[: len(head)].addmm_(grad.T, x)  # in place: no second [V, d] exists
        return product(grad, head.T, rows)
    # Without instructions for bfloat16, its products are ten times slower than a copy in float32.
    is_slow = x.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512"
    kind = torch.float32 if is_slow else x.dtype
    x, grad_x = x.to(kind), torch.zeros_like(x, dtype=torch.float32)
    for first in range(0, len(head), HEAD_ROWS):
        some = slice(first, first + HEAD_ROWS)
        part, weight = grad[:, some].to(kind), head[some].to(kind)
        grad_x += product(part, weight.T, rows)
        if len(grad_head):
            grad_head[first: first + len(weight)] += part.T @ x
    return grad_x.to(grad.dtype)


def save_token_logps(ctx, inputs, output):
    """What the backward pass of `token_logps` needs: no logits."""
    hidden, head, targets, mask, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(hidden, head, targets, mask, output[2])


def backward_of_token_logps(ctx, grad_logps, _entropy, _lse):
    """Gradients of the inputs of `token_logps`."""
    settings = *ctx.saved_tensors, *ctx.settings, ctx.needs_input_grad[1]
    grad_hidden, grad_head = token_logps_backward_op(grad_logps, *settings)
    return grad_hidden, grad_head if settings[-1] else None, *[None] * 6


token_logps_op.register_autograd(backward_of_token_logps, setup_context=save_token_logps)


# ------------------------------------------------------------------------------ draws, advantages


def sample(logits, keys, steps, samples, positions, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
           num_valid=None):  # fmt: skip
    """Draw one token a row: (ids int64 [B], logps float32 [B]).

    logits [B, V] of any float dtype; keys (of `noise_key`), steps, samples, positions [B] integers,
    which make the Gumbel noise. The id is the argmax of logits / temperature + noise among what the
    filters keep; at temperature 0 that of the logits. The log-prob is that of the tempered *full*
    softmax over the first `num_valid` entries, filters or not (at temperature 0: of the plain
    softmax), bit for bit as `logprob` has it. Not differentiable.
    """
    B, V = logits.shape
    counters = [np.asarray(x, dtype=np.uint64) for x in (keys, steps, samples, positions)]
    if any(x.shape != (B,) for x in counters):
        raise ValueError(f"{B} rows need as many keys, steps, samples and positions")
    num_valid = check_rows(B, V, None, None, temperature or 1.0, num_valid)
    is_filtered = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
    if is_filtered or not is_native(logits):
        logits = logits[:, :num_valid]
        noise = gumbel_noise(*counters, num_valid).to(logits.device) if temperature > 0 else None
        ids, logps = ref.sample_ref(logits, noise, temperature, top_k, top_p, min_p)
        return ids, logprob(logits, ids, None, temperature or 1.0)[0] if is_filtered else logps
    logits, ids = in_rows(logits), torch.empty(B, dtype=torch.int64, device=logits.device)
    logps = torch.empty(B, dtype=torch.float32, device=logits.device)
    counters = [torch.from_numpy(x.view(np.int64)).to(logits.device) for x in counters]
    launch("sample", logits.device, *fields(logits, float(temperature), num_valid), *counters, ids,
           logps)  # fmt: skip
    return ids, logps


def group_advantages(rewards, offsets, scored, normalize, eps, flat):
    """(r - mean) / (std + eps) in each group, float32 [R]; exactly 0 if unscored, alone or flat.

    rewards float64 [R], sorted by group; group p is [offsets[p], offsets[p + 1]), int64 [P + 1].
    scored bool [R]. normalize: "std" (population), "std1" (sample), "none". Flat: a group whose
    scored rewards differ by no more than `flat`. Computed in float64.
    """
    R = len(rewards)
    kinds = (rewards.dtype, offsets.dtype, scored.dtype)
    if kinds != (torch.float64, torch.int64, torch.bool) or len(scored) != R:
        raise ValueError(f"need float64 rewards, int64 offsets, bool scored, not {kinds}")
    borders = [0, *offsets.tolist(), R]
    if len(offsets) < 1 or borders != sorted(borders) or borders[1] or borders[-2] != R:
        raise ValueError(f"offsets have to rise from 0 to the {R} rewards")
    out = torch.empty(R, dtype=torch.float32, device=rewards.device)
    if not is_native(out):
        return ref.group_advantages_ref(rewards, offsets, scored, normalize, eps, flat)
    rewards, offsets, scored = (x.contiguous() for x in (rewards, offsets, scored))
    launch("group_advantages", rewards.device, rewards, offsets, scored, len(offsets) - 1,
           NORMALIZE[normalize], eps, flat, out)  # fmt: skip
    return out


def check_rows(N, V, targets, mask, temperature, num_valid):
    """ValueError for what `logprob` does not take; returns num_valid, V where it is None."""
    num_valid = V if num_valid is None else num_valid
    if not 0 < num_valid <= V:
        raise ValueError(f"num_valid is {num_valid} but there are {V} columns")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: it has to be above 0")
    if mask is not None and (mask.shape != (N,) or mask.dtype != torch.bool):
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}, not bool [{N}]")
    if targets is None:
        return num_valid
    if targets.shape != (N,) or targets.dtype != torch.int64:
        raise ValueError(f"targets are {targets.dtype} {list(targets.shape)}, not int64 [{N}]")
    if targets.device.type == "cpu":  # elsewhere it would wait; the kernel gives NaN there
        wrong = ((targets < 0) | (targets >= num_valid)) & (True if mask is None else mask)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(f"target {targets[row]} of row {row} is not below {num_valid}")
    return num_valid


def three_rows(like):
    """Three float32 tensors [N] to be filled."""
    return tuple(like.new_empty(len(like), dtype=torch.float32) for _ in range(3))


def fields(logits, temperature, num_valid):
    """The fields of `Logits` in csrc/kernels.h."""
    return logits, DTYPES[logits.dtype], *logits.shape, logits.stride(0), num_valid, temperature


OPS = (logprob, token_logps, group_advantages, sample, kv_write_, kv_copy_, paged_attention,
       packed_attention)  # fmt: skip

if __name__ == "__main__":
    for op in OPS:
        print(op.__name__, backend())

"""The objective: LM head and losses on the labelled slots only, in chunks, with the gradient made in the forward pass.

Shapes: N blocks, K slots a block, M labelled slots (padded with index -1), C rows of a chunk, H hidden size, V words.
Write q for the drafter's distribution at a slot, p for the target's, z for the drafter's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from dflash_lightning.batch import HiddenStateBatch

LK_ETA = 3.0


@dataclass(frozen=True)
class LMHead:
    """The target's frozen LM head, and what turns its logits into a distribution."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0  # logits are multiplied by it (Cohere, Granite)
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap) (Gemma's final_logit_softcapping)
    final_norm: Callable[[Tensor], Tensor] | None = None  # the target's own, for losses that need its distribution

    @classmethod
    def of(cls, frozen: Any) -> LMHead:
        """The head of a `target.loading.FrozenHead`, with all that the target does to its logits."""
        return cls(frozen.weight, frozen.bias, frozen.logit_scale, frozen.logit_softcap, frozen.final_norm)

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Float32 logits [C, V], a fresh tensor; the matmul runs in the head's dtype."""
        logits_CV = torch.nn.functional.linear(hidden_CH.to(self.weight.dtype), self.weight, self.bias).float()
        if self.scale != 1.0:
            logits_CV.mul_(self.scale)
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV

    def hidden_gradient(self, grad_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """Gradient [C, H] of the hidden states from that of the logits, which is overwritten."""
        if self.softcap is not None:
            grad_CV.mul_(1 - (logits_CV / self.softcap).square())
        grad_CH = grad_CV.to(self.weight.dtype) @ self.weight
        return grad_CH if self.scale == 1.0 else grad_CH.mul_(self.scale)


def linear_cross_entropy(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of weight * cross-entropy through a frozen LM head, bool argmax == label [M], cross-entropy [M].

    Rows of weight 0 add nothing. Memory: one chunk of logits, and one [M, H] gradient kept for the backward.
    """
    head = LMHead(weight_VH, bias, scale, softcap)
    value_M, nll_M, correct_M = head_losses(hidden_MH, head, labels_M, chunk_size=chunk_size)
    return (weights_M * value_M).sum(), correct_M, nll_M


def head_losses(
    hidden_MH: Tensor,
    head: LMHead,
    labels_M: Tensor,
    *,
    terms: Mapping[str, float] | None = None,
    target_hidden_MH: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each row (a weighted sum of `terms`, default cross-entropy), its cross-entropy, and argmax == label.

    Only the loss has a gradient, and only towards `hidden_MH`. `target_hidden_MH`: the target's final-normed states.
    """
    if chunk_size is None:
        # One chunk of float32 logits: 64 MiB on CPU, where larger ones leave the cache; 1 GiB on a GPU, to fill it.
        budget = 2**26 if hidden_MH.device.type == "cpu" else 2**30
        chunk_size = 1 << max((budget // (4 * head.weight.shape[0])).bit_length() - 1, 6)
    loss_M, nll_M, correct_M = _HeadLosses.apply(
        hidden_MH, target_hidden_MH, head, labels_M, dict(terms or {"ce": 1.0}), chunk_size
    )  # pyright: ignore[reportGeneralTypeIssues]
    return loss_M, nll_M, correct_M


class _HeadLosses(torch.autograd.Function):
    """A row's loss depends on its own hidden state only, so its gradient can be made before the weights are known."""

    @staticmethod
    def forward(ctx, hidden_MH, target_MH, head, labels_M, terms, chunk_size):
        rows = hidden_MH.shape[0]
        with_grad = ctx.needs_input_grad[0]
        loss_M, nll_M = (torch.empty(rows, dtype=torch.float32, device=hidden_MH.device) for _ in range(2))
        correct_M = torch.empty(rows, dtype=torch.bool, device=hidden_MH.device)
        grad_MH = torch.empty_like(hidden_MH) if with_grad else None
        with torch.autocast(hidden_MH.device.type, enabled=False):
            for first in range(0, rows, chunk_size):
                part = slice(first, first + chunk_size)
                logits_CV = head.logits(hidden_MH[part])
                label_C1 = labels_M[part, None].clamp(min=0)  # -1 where a row is padding
                best_C1, best_index_C1 = logits_CV.max(dim=1, keepdim=True)
                label_logit_C1 = logits_CV.gather(1, label_C1)
                reusable = head.softcap is None and set(terms) == {"ce"} and logits_CV.device.type == "cpu"
                # Row by row the CPU kernel reads a row before it writes it, so the logits' memory can take the result.
                probs_CV = torch.softmax(logits_CV, 1, out=logits_CV) if reusable else torch.softmax(logits_CV, 1)
                # The largest probability is at least 1 / V: its logarithm is exact enough, the label's may not exist.
                lse_C1 = best_C1 - probs_CV.gather(1, best_index_C1).log()
                nll_M[part] = (lse_C1 - label_logit_C1)[:, 0]
                correct_M[part] = best_index_C1[:, 0] == labels_M[part]
                if set(terms) == {"ce"}:
                    loss_M[part] = nll_M[part] * terms["ce"]
                    grad_CV = probs_CV
                    grad_CV.scatter_add_(1, label_C1, torch.full_like(lse_C1, -1.0))
                    if terms["ce"] != 1.0:
                        grad_CV.mul_(terms["ce"])
                else:
                    target_logits_CV = None if target_MH is None else head.logits(target_MH[part])
                    loss_M[part], grad_CV = _mixed_loss(
                        terms, logits_CV - lse_C1, probs_CV, nll_M[part], label_C1, target_logits_CV
                    )
                if grad_MH is not None:
                    grad_MH[part] = head.hidden_gradient(grad_CV, logits_CV)
        if grad_MH is not None:
            ctx.save_for_backward(grad_MH)
        ctx.mark_non_differentiable(nll_M, correct_M)
        return loss_M, nll_M, correct_M

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_MH,) = ctx.saved_tensors
        return (grads[0][:, None] * grad_MH).to(grad_MH.dtype), None, None, None, None, None


def _mixed_loss(
    terms: Mapping[str, float],
    log_q_CV: Tensor,
    q_CV: Tensor,
    nll_C: Tensor,
    label_C1: Tensor,
    target_logits_CV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    loss_C, grad_CV = torch.zeros_like(nll_C), torch.zeros_like(q_CV)
    for name, factor in terms.items():
        if name == "ce":
            value_C = nll_C
            term_grad_CV = q_CV.scatter_add(1, label_C1, torch.full_like(nll_C[:, None], -1.0))
        else:
            assert target_logits_CV is not None, name
            value_C, term_grad_CV = TARGET_LOSSES[name](log_q_CV, q_CV, target_logits_CV.log_softmax(1))
        loss_C += factor * value_C
        grad_CV.add_(term_grad_CV, alpha=factor)
    return loss_C, grad_CV


def kl_loss(log_q: Tensor, q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q); dz = q - p. Hinton et al., arXiv 1503.02531, section 2 (temperature 1)."""
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(1), q - p


def reverse_kl_loss(log_q: Tensor, q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q (log q - log p); dz = q (log q - log p - loss). Gu et al., MiniLLM, arXiv 2306.08543."""
    ratio = log_q - log_p
    loss = (q * ratio).sum(1)
    return loss, q * (ratio - loss[:, None])


def tv_loss(log_q: Tensor, q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Total variation 1 - alpha, alpha = sum min(p, q) the acceptance rate of Leviathan et al., arXiv 2211.17192.

    Where q <= p the minimum is q, hence dz = q (s - [q <= p]) with s the sum of q there.
    """
    p = log_p.exp()
    loss = 1 - torch.minimum(p, q).sum(1)
    below = (q <= p).to(q.dtype)
    return loss, q * ((q * below).sum(1, keepdim=True) - below)


def nla_loss(log_q: Tensor, q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """-log alpha, the likelihood form of LK Losses, arXiv 2602.23881; dz = dz(tv) / alpha."""
    tv, grad = tv_loss(log_q, q, log_p)
    alpha = (1 - tv).clamp(min=torch.finfo(q.dtype).tiny)
    return -alpha.log(), grad / alpha[:, None]


def lk_loss(log_q: Tensor, q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """lambda KL(p || q) + (1 - lambda) TV, lambda = exp(-3 alpha) detached: LK Losses' hybrid, arXiv 2602.23881."""
    tv, tv_grad = tv_loss(log_q, q, log_p)
    kl, kl_grad = kl_loss(log_q, q, log_p)
    mix = torch.exp(-LK_ETA * (1 - tv))
    return mix * kl + (1 - mix) * tv, mix[:, None] * kl_grad + (1 - mix)[:, None] * tv_grad


TARGET_LOSSES = {"kl": kl_loss, "reverse_kl": reverse_kl_loss, "tv": tv_loss, "nla": nla_loss, "lk": lk_loss}


def decay_weights(block_size: int, gamma: float | None, device: torch.device | str = "cpu") -> Tensor:
    """exp(-(k - 1) / gamma) for slots k >= 1 (1 when gamma is None), 0 for slot 0; [K]. DFlash, arXiv 2602.06036."""
    slot_K = torch.arange(block_size, dtype=torch.float32, device=device)
    weights_K = torch.ones_like(slot_K) if gamma is None else torch.exp((1 - slot_K) / gamma)
    return torch.where(slot_K > 0, weights_K, 0.0)


def dpace_weights(label_probs_NK: Tensor, label_mask_NK: Tensor, alpha: float) -> Tensor:
    """D-PACE: how much the accepted length gains from slot k, w_k = sum of c_i over supervised i >= k; [N, K].

    c is the cumulative product over the block of s_k = (1 - alpha) p(label_k) + alpha, 1 where unsupervised.
    """
    smooth_NK = torch.where(label_mask_NK, (1 - alpha) * label_probs_NK + alpha, 1.0)
    reached_NK = smooth_NK.cumprod(1) * label_mask_NK
    return reached_NK.flip(1).cumsum(1).flip(1) * label_mask_NK


class LossOutput(NamedTuple):
    """Loss = numerator / denominator once both are summed over ranks and the accumulation window."""

    numerator: Tensor  # scalar, differentiable
    denominator: Tensor  # scalar
    correct: Tensor  # [N, K] bool, argmax equals the label; False where there is no label


class Objective:
    """Which losses, and how slots are weighted. Called with the drafter's states, the batch and the target's LM head.

    Args:
        loss: `ce`, `kl`, `reverse_kl`, `tv`, `nla` or `lk`, or a mapping from such names to factors.
        weights: `decay` (fixed, by slot) or `dpace` (by the drafter's own probabilities).
        gamma: decay length in slots; null weighs all slots alike. Only for `decay`.
        alpha: smoothing of the probabilities, 0 to 1. Only for `dpace`.
    """

    def __init__(
        self,
        loss: str | dict[str, float] = "ce",
        weights: str = "decay",
        gamma: float | None = 7.0,
        alpha: float = 0.5,
        chunk_size: int | None = None,
    ) -> None:
        self.terms = {loss: 1.0} if isinstance(loss, str) else dict(loss)
        known = ("ce", *TARGET_LOSSES)
        if not self.terms or not set(self.terms) <= set(known):
            raise ValueError(f"loss={loss!r}: use one of {', '.join(known)}, or a mapping from such names to factors")
        if weights not in ("decay", "dpace"):
            raise ValueError(f"weights={weights!r}: use 'decay' or 'dpace'")
        if gamma is not None and gamma <= 0:
            raise ValueError(f"gamma={gamma}: use a positive number of slots, or null for no decay")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha}: use a number from 0 to 1")
        self.weights, self.gamma, self.alpha, self.chunk_size = weights, gamma, alpha, chunk_size

    @property
    def needs_target(self) -> bool:
        """Whether a loss reads the target's distribution, so that the batch must hold `last_hidden_state`."""
        return any(name != "ce" for name in self.terms)

    def __call__(self, hidden_NKH: Tensor, batch: HiddenStateBatch, head: LMHead) -> LossOutput:
        """Numerator, denominator and argmax matches; no host sync, and zeros (never NaN) without a labelled slot."""
        num_blocks, size = batch.labels.shape
        slot_index_M = batch.slot_index
        if batch.num_labels is not None and slot_index_M.device.type == "cpu":
            # The padding keeps shapes few on a GPU; on a CPU its rows of the head matmul would only cost time.
            slot_index_M = slot_index_M[: max(batch.num_labels, 1)]
        labelled_M = slot_index_M >= 0
        index_M = slot_index_M.clamp(min=0)
        loss_M, nll_M, correct_M = head_losses(
            hidden_NKH.flatten(0, 1).index_select(0, index_M),
            head,
            batch.labels.flatten()[index_M],
            terms=self.terms,
            target_hidden_MH=self._target_hidden(batch, index_M, head) if self.needs_target else None,
            chunk_size=self.chunk_size,
        )

        def on_grid(values_M: Tensor, fill: Any) -> Tensor:
            # Padding writes into one more cell, which is cut off.
            cell_M = torch.where(labelled_M, slot_index_M, num_blocks * size)
            grid = torch.full((num_blocks * size + 1,), fill, dtype=values_M.dtype, device=values_M.device)
            return grid.scatter(0, cell_M, values_M)[:-1].view(num_blocks, size)

        if self.weights == "decay":
            weights_NK = decay_weights(size, self.gamma, batch.labels.device) * batch.label_mask
            denominator = weights_NK.sum()
        else:
            weights_NK = dpace_weights(on_grid(torch.exp(-nll_M), 1.0), batch.label_mask, self.alpha)
            denominator = _documents_with_blocks(batch)
        weights_M = torch.where(labelled_M, weights_NK.flatten()[index_M], 0.0)
        return LossOutput((weights_M * loss_M).sum(), denominator, on_grid(correct_M, False))

    def _target_hidden(self, batch: HiddenStateBatch, index_M: Tensor, head: LMHead) -> Tensor:
        if batch.last_hidden_state is None:
            raise ValueError(f"loss={self.terms}: needs the target's last hidden state, which the batch does not hold")
        assert head.final_norm is not None, "the target's final norm makes its last state ready for its head"
        # The target's distribution of the token at a + k stands at position a + k - 1.
        position_M = batch.anchors[index_M // batch.labels.shape[1]] + index_M % batch.labels.shape[1] - 1
        with torch.no_grad():
            return head.final_norm(batch.last_hidden_state[position_M.clamp(min=0)])


def _documents_with_blocks(batch: HiddenStateBatch) -> Tensor:
    # Anchors are sorted and the padding comes last: a document's first block is where the document changes.
    document_N = torch.where(batch.anchor_valid, batch.document_ids[batch.anchors], -1)
    first_N = torch.cat([torch.ones_like(document_N[:1], dtype=torch.bool), document_N[1:] != document_N[:-1]])
    return (first_N & batch.anchor_valid).sum().float()

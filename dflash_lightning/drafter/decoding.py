"""Speculative decoding with a drafter: one sequence, KV caches on both sides, greedy or exact sampling.

Shapes: K slots a block, S tokens of one target forward, V vocabulary, F = L_t*H hidden values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dflash_lightning.drafter.config import mask_token_id
from dflash_lightning.drafter.model import DFlashDraftModel


class SequenceTarget(Protocol):
    """What decoding needs of the target: append tokens, take some back."""

    def reset(self) -> None: ...

    def step(self, ids: Sequence[int], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Append `ids`; logits [S, V] (or [1, V]) and hidden states [S, F]."""
        ...

    def drop(self, count: int) -> None: ...


@dataclass
class Decoded:
    """One decoded sequence and what it cost."""

    tokens: list[int]
    seconds: float
    gained: list[int] = field(default_factory=list)  # tokens of each verifying target forward, the bonus counted
    gaps: list[float] = field(default_factory=list)  # plain greedy decoding: top logit minus second, a token

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per target forward (tau); 1.0 where no forward verified a draft."""
        return sum(self.gained) / len(self.gained) if self.gained else 1.0


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Args:
        max_new_tokens: most tokens to decode.
        temperature: 0 is greedy.
        stop_ids: tokens that end the sequence; they are part of it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    stop_ids: Collection[int] = ()

    def probabilities(self, logits_SV: Tensor) -> Tensor:
        """Distribution that tokens are drawn from, [S, V]; one-hot at the largest logit when greedy."""
        if self.temperature == 0.0:
            return torch.zeros_like(logits_SV).scatter_(-1, logits_SV.argmax(-1, keepdim=True), 1.0)
        return torch.softmax(logits_SV / self.temperature, dim=-1)


@torch.inference_mode()
def decode_plain(
    target: SequenceTarget,
    prompt: Sequence[int],
    options: SamplingOptions,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decode with the target alone, one token a forward."""
    started = time.perf_counter()
    target.reset()
    tokens: list[int] = []
    gaps: list[float] = []
    pending = list(prompt)
    while len(tokens) < options.max_new_tokens and not (tokens and tokens[-1] in options.stop_ids):
        logits_1V, _ = target.step(pending, last_only=True)
        top = logits_1V[-1].topk(2).values
        gaps.append(float(top[0] - top[1]))
        tokens.append(_draw(options.probabilities(logits_1V[-1:]), generator)[0])
        pending = tokens[-1:]
    return Decoded(tokens, time.perf_counter() - started, gaps=gaps)


@torch.inference_mode()
def decode_speculative(
    target: SequenceTarget,
    drafter: DFlashDraftModel,
    embed: Callable[[Tensor], Tensor],
    lm_head: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    options: SamplingOptions,
    generator: torch.Generator | None = None,
    num_speculative_tokens: int | None = None,
) -> Decoded:
    """Decode with drafted blocks; the distribution of the result is the target's own.

    Args:
        embed, lm_head: the target's embedding [K] -> [K, H] and LM head [K, H] -> [K, V].
        num_speculative_tokens: tokens to draft a forward, at most K - 1 (the default); a shorter block is drafted, as
            engines do.

    Greedy: a draft token stands while it equals the target's choice. Sampling: draft token d stands with probability
    min(1, p(d) / q(d)), else the token is drawn from max(p - q, 0) (Leviathan et al., arXiv 2211.17192, section 2.3).
    """
    started = time.perf_counter()
    target.reset()
    device = next(drafter.parameters()).device
    num_drafted = resolve_num_speculative_tokens(drafter.config.block_size, num_speculative_tokens)
    masks = [mask_token_id(drafter.config)] * num_drafted

    logits_1V, hidden_SF = target.step(prompt, last_only=True)
    context = drafter.context_kv(hidden_SF.to(device), torch.arange(len(prompt), device=device))
    tokens = _draw(options.probabilities(logits_1V[-1:]), generator)
    gained: list[int] = []
    while len(tokens) < options.max_new_tokens and tokens[-1] not in options.stop_ids:
        anchor = len(prompt) + len(tokens) - 1
        block_K = torch.tensor([tokens[-1], *masks], device=device)
        hidden_KH = drafter.decode_block(embed(block_K), anchor, context)
        draft_probs_DV = options.probabilities(lm_head(hidden_KH[1:]).float())
        drafts = _draw(draft_probs_DV, generator)

        logits_KV, hidden_KF = target.step([tokens[-1], *drafts])
        new = _verify(options.probabilities(logits_KV), draft_probs_DV.to(logits_KV.device), drafts, generator)
        accepted = len(new) - 1
        target.drop(num_drafted - accepted)
        # Only now do the states of the anchor and of the accepted tokens exist: they are the next block's context.
        positions = torch.arange(anchor, anchor + len(new), device=device)
        fresh = drafter.context_kv(hidden_KF[: len(new)].to(device), positions)
        context = [
            (torch.cat([k, new_k], dim=-2), torch.cat([v, new_v], dim=-2))
            for (k, v), (new_k, new_v) in zip(context, fresh, strict=True)
        ]
        stop = next((i for i, t in enumerate(new) if t in options.stop_ids), None)
        new = new if stop is None else new[: stop + 1]
        gained.append(len(new))
        tokens += new
    return Decoded(tokens[: options.max_new_tokens], time.perf_counter() - started, gained)


def resolve_num_speculative_tokens(block_size: int, given: int | None) -> int:
    """Tokens to draft a forward. Raises ValueError unless 1 <= `given` <= block_size - 1."""
    if given is None:
        return block_size - 1
    if not 1 <= given < block_size:
        raise ValueError(
            f"num_speculative_tokens={given}: the drafter's block_size={block_size} drafts 1 to {block_size - 1} tokens"
        )
    return given


def _draw(probs_SV: Tensor, generator: torch.Generator | None) -> list[int]:
    if generator is None:
        return probs_SV.argmax(-1).tolist()
    return torch.multinomial(probs_SV, 1, generator=generator).squeeze(-1).tolist()


def _verify(target_KV: Tensor, draft_DV: Tensor, drafts: Sequence[int], generator: torch.Generator | None) -> list[int]:
    """Accepted draft tokens and one more from the target: from the residual after a rejection, else the bonus."""
    for i, token in enumerate(drafts):
        p, q = target_KV[i, token], draft_DV[i, token]
        if generator is None:
            if p == 0:
                return [*drafts[:i], *_draw(target_KV[i : i + 1], None)]
        elif torch.rand((), generator=generator, device=p.device) * q >= p:
            residual_1V = (target_KV[i : i + 1] - draft_DV[i : i + 1]).clamp(min=0)
            return [*drafts[:i], *_draw(residual_1V, generator)]
    return [*drafts, *_draw(target_KV[-1:], generator)]


def first_difference(plain: Decoded, speculative: Decoded, tie: float = 1e-3) -> tuple[int, float] | None:
    """Where greedy outputs part: (position, the target's logit gap there), or None when they are equal.

    Two forwards of different width may round a tie differently: a difference at a gap under `tie` is no loss.
    """
    for i, (a, b) in enumerate(zip(plain.tokens, speculative.tokens, strict=False)):
        if a != b:
            return None if plain.gaps[i] < tie else (i, plain.gaps[i])
    if len(plain.tokens) != len(speculative.tokens):
        return min(len(plain.tokens), len(speculative.tokens)), float("inf")
    return None

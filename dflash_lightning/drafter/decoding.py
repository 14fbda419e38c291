"""Speculative decoding with a drafter: a batch of rows, KV caches on both sides, greedy or exact sampling.

A row's output does not depend on the rows beside it: each has its own random numbers, and no attention crosses rows.
Only rounding does: a matmul of another shape may round differently, which shows where two tokens are all but tied.
Shapes: B rows, K slots a block, D = K - 1 drafted tokens, S tokens of one target forward, V vocabulary, F = L_t*H
hidden values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_lightning.drafter.config import mask_token_id
from dflash_lightning.drafter.context import DraftContext
from dflash_lightning.drafter.model import DFlashDraftModel

Generators = Sequence[torch.Generator] | None  # one a row; None where nothing is drawn at random


class BatchTarget(Protocol):
    """What decoding needs of the target: append tokens to every row, take some back, let rows go."""

    def reset(self) -> None: ...

    def step(self, ids: Sequence[Sequence[int]], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Append `ids`; logits [B, S, V] (or [B, 1, V]), hidden states [B, S, F], rows right-aligned."""
        ...

    def retain(self, rows: Sequence[int], drop: Sequence[int]) -> None:
        """Keep `rows` alone, each without its last `drop` tokens."""
        ...


@dataclass
class Decoded:
    """One decoded sequence and what it cost."""

    tokens: list[int]
    seconds: float  # its share of the wall time: a forward's is divided among the rows in it
    gained: list[int] = field(default_factory=list)  # tokens of each verifying target forward, the bonus counted
    gaps: list[float] = field(default_factory=list)  # plain decoding: top logit minus second, a token

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per target forward (tau); 1.0 where no forward verified a draft."""
        return sum(self.gained) / len(self.gained) if self.gained else 1.0


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Args:
        max_new_tokens: most tokens to decode a row.
        temperature: 0 is greedy.
        stop_ids: tokens that end a row; they are part of it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    stop_ids: Collection[int] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Distribution [..., V] that tokens are drawn from, when not greedy."""
        return torch.softmax(logits / self.temperature, dim=-1)


class _Rows:
    """What every row has so far, which of them go on, and the clock."""

    def __init__(
        self, count: int, options: SamplingOptions, generators: Generators, heard: Callable[[int, list[int]], None]
    ) -> None:
        assert options.greedy or (generators is not None and len(generators) == count), "sampling: a generator a row"
        self.done = [Decoded([], 0.0) for _ in range(count)]
        self.going = list(range(count))
        self._options, self._generators, self._heard = options, generators, heard
        self._last = time.perf_counter()

    def draw(self, logits_BSV: Tensor) -> tuple[list[list[int]], Tensor | None]:
        """A token for each row and place, and the distributions that they come from unless greedy."""
        if self._options.greedy:
            return logits_BSV.argmax(-1).tolist(), None
        probs_BSV = self._options.probabilities(logits_BSV)
        return [_sample(p, g) for p, g in zip(probs_BSV, self.generators(), strict=True)], probs_BSV

    def generators(self) -> list[torch.Generator]:
        """Those of the rows that go on."""
        assert self._generators is not None
        return [self._generators[row] for row in self.going]

    def last(self) -> list[int]:
        return [self.done[row].tokens[-1] for row in self.going]

    def add(self, new: Sequence[Sequence[int]], *, drafted: bool = False) -> list[int]:
        """Append each row's tokens up to a stop token; returns the places of the rows that go on."""
        now = time.perf_counter()
        share, self._last = (now - self._last) / len(self.going), now
        places = []
        for place, (row, tokens) in enumerate(zip(self.going, new, strict=True)):
            out = self.done[row]
            stop = next((i for i, t in enumerate(tokens) if t in self._options.stop_ids), None)
            tokens = list(tokens if stop is None else tokens[: stop + 1])
            out.seconds += share
            if drafted:
                out.gained.append(len(tokens))
            tokens = tokens[: self._options.max_new_tokens - len(out.tokens)]
            out.tokens += tokens
            self._heard(row, tokens)
            if stop is None and len(out.tokens) < self._options.max_new_tokens:
                places.append(place)
        self.going = [self.going[place] for place in places]
        return places


def _unheard(_row: int, _tokens: list[int]) -> None: ...


@torch.inference_mode()
def decode_plain(
    target: BatchTarget,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    generators: Generators = None,
    on_tokens: Callable[[int, list[int]], None] = _unheard,
) -> list[Decoded]:
    """Decode with the target alone, one token a row and forward; arguments as for `decode_speculative`."""
    rows = _Rows(len(prompts), options, generators, on_tokens)
    target.reset()
    pending: Sequence[Sequence[int]] = prompts
    while rows.going:
        logits_B1V, _ = target.step(pending, last_only=True)
        top_B2 = logits_B1V[:, -1].topk(2).values
        for row, gap in zip(rows.going, (top_B2[:, 0] - top_B2[:, 1]).tolist(), strict=True):
            rows.done[row].gaps.append(gap)
        before = len(rows.going)
        places = rows.add(rows.draw(logits_B1V)[0])
        if 0 < len(places) < before:
            target.retain(places, [0] * len(places))
        pending = [[token] for token in rows.last()]
    return rows.done


@torch.inference_mode()
def decode_speculative(
    target: BatchTarget,
    drafter: DFlashDraftModel,
    embed: Callable[[Tensor], Tensor],
    lm_head: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    generators: Generators = None,
    num_speculative_tokens: int | None = None,
    on_tokens: Callable[[int, list[int]], None] = _unheard,
) -> list[Decoded]:
    """Decode prompts together with drafted blocks; the distribution of each result is the target's own.

    Every row accepts what it can; a row that has ended leaves the batch.

    Args:
        embed, lm_head: the target's embedding [B, K] -> [B, K, H] and LM head [B, D, H] -> [B, D, V].
        generators: one a row, when sampling.
        num_speculative_tokens: tokens to draft a forward, at most K - 1 (the default); a shorter block is drafted, as
            engines do.
        on_tokens: called with a row's number and its new tokens as soon as they are verified.

    Greedy: a draft token stands while it equals the target's choice. Sampling: draft token d stands with probability
    min(1, p(d) / q(d)), else the token is drawn from max(p - q, 0) (Leviathan et al., arXiv 2211.17192, section 2.3).
    """
    rows = _Rows(len(prompts), options, generators, on_tokens)
    target.reset()
    device = next(drafter.parameters()).device
    num_drafted = resolve_num_speculative_tokens(drafter.config.block_size, num_speculative_tokens)
    masks = [mask_token_id(drafter.config)] * num_drafted

    logits_B1V, hidden_BSF = target.step(prompts, last_only=True)
    context = DraftContext(len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    own = [hidden_SF[-length:] for hidden_SF, length in zip(hidden_BSF.to(device), lengths, strict=True)]
    drafter.extend_context(context, pad_sequence(own, batch_first=True), lengths)
    places = rows.add(rows.draw(logits_B1V)[0])
    if 0 < len(places) < len(prompts):
        context.retain(places)
        target.retain(places, [0] * len(places))
    while rows.going:
        last = rows.last()
        block_BK = torch.tensor([[token, *masks] for token in last], device=device)
        states_BKH = drafter.decode_blocks(embed(block_BK), context)
        # Contiguous: a CPU takes six times as long for the head of a strided slice.
        drafts, draft_BDV = rows.draw(lm_head(states_BKH[:, 1:].contiguous()).float())

        logits_BKV, hidden_BKF = target.step([[token, *draft] for token, draft in zip(last, drafts, strict=True)])
        if draft_BDV is None:
            new = [_accept(*pair) for pair in zip(drafts, logits_BKV.argmax(-1).tolist(), strict=True)]
        else:
            target_BKV = options.probabilities(logits_BKV)
            each = zip(target_BKV, draft_BDV.to(target_BKV.device), drafts, rows.generators(), strict=True)
            new = [_verify(*row) for row in each]
        # Only now do the states of the anchor and of the accepted tokens exist: they are the next block's context.
        drafter.extend_context(context, hidden_BKF.to(device), [len(tokens) for tokens in new])
        places = rows.add(new, drafted=True)
        if places:
            context.retain(places)
            target.retain(places, [num_drafted + 1 - len(new[place]) for place in places])
    return rows.done


def resolve_num_speculative_tokens(block_size: int, given: int | None) -> int:
    """Tokens to draft a forward. Raises ValueError unless 1 <= `given` <= block_size - 1."""
    if given is None:
        return block_size - 1
    if not 1 <= given < block_size:
        raise ValueError(
            f"num_speculative_tokens={given}: the drafter's block_size={block_size} drafts 1 to {block_size - 1} tokens"
        )
    return given


def _sample(probs_SV: Tensor, generator: torch.Generator) -> list[int]:
    return torch.multinomial(probs_SV, 1, generator=generator).squeeze(-1).tolist()


def _accept(drafts: Sequence[int], best: Sequence[int]) -> list[int]:
    """Greedy: the drafts before the first that is not the target's choice, and that choice."""
    count = next((i for i, token in enumerate(drafts) if token != best[i]), len(drafts))
    return [*drafts[:count], best[count]]


def _verify(target_KV: Tensor, draft_DV: Tensor, drafts: Sequence[int], generator: torch.Generator) -> list[int]:
    """Accepted draft tokens and one more from the target: from the residual after a rejection, else the bonus."""
    index_D1 = torch.tensor(drafts, device=target_KV.device)[:, None]
    p_D, q_D = target_KV[:-1].gather(1, index_D1)[:, 0], draft_DV.gather(1, index_D1)[:, 0]
    random_D = torch.rand(len(drafts), generator=generator, device=target_KV.device)
    stands = (random_D * q_D < p_D).tolist()
    count = stands.index(False) if False in stands else len(drafts)
    rest_1V = target_KV[count : count + 1]
    if count < len(drafts):
        residual_1V = (rest_1V - draft_DV[count : count + 1]).clamp(min=0)
        # Rounding can leave nothing where both distributions are all but equal.
        rest_1V = residual_1V if float(residual_1V.sum()) > 0 else rest_1V
    return [*drafts[:count], *_sample(rest_1V, generator)]


def first_difference(plain: Decoded, speculative: Decoded, tie: float = 1e-3) -> tuple[int, float] | None:
    """Where greedy outputs part: (position, the target's logit gap there), or None when they are equal.

    Two forwards of different shape may round a tie differently: a difference at a gap under `tie` is no loss.
    """
    for i, (a, b) in enumerate(zip(plain.tokens, speculative.tokens, strict=False)):
        if a != b:
            return None if plain.gaps[i] < tie else (i, plain.gaps[i])
    if len(plain.tokens) != len(speculative.tokens):
        return min(len(plain.tokens), len(speculative.tokens)), float("inf")
    return None

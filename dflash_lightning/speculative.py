"""A target that decodes with drafters: loads it once, checks that a drafter fits, measures acceptance and speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_lightning.drafter.config import mask_token_id, target_layer_ids
from dflash_lightning.drafter.decoding import (
    Decoded,
    SamplingOptions,
    decode_plain,
    decode_speculative,
    first_difference,
)
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.walk import gains
from dflash_lightning.prompts import Prompt
from dflash_lightning.target.decode import TargetDecoder
from dflash_lightning.target.loading import FrozenHead, load_model
from dflash_lightning.target.resolve import load_target_config, load_tokenizer


@dataclass
class PromptResult:
    """One prompt decoded both ways."""

    prompt: str
    text: str
    tokens: int
    acceptance_length: float
    forwards: int
    seconds: float
    seconds_plain: float
    tokens_plain: int
    lossless: bool | None  # None when sampling: two random outputs need not be equal
    difference: str = ""
    group: str = "all"


@dataclass
class Speeds:
    """Tau (mean over all target forwards) and tokens per second of some prompts."""

    prompts: int
    acceptance_length: float
    tokens_per_second: float
    tokens_per_second_plain: float

    @classmethod
    def of(cls, results: Sequence[PromptResult]) -> Speeds:
        # The first token comes from the prompt's own forward, which verifies no draft.
        gained = sum(r.acceptance_length * r.forwards for r in results)
        return cls(
            prompts=len(results),
            acceptance_length=gained / max(sum(r.forwards for r in results), 1),
            tokens_per_second=sum(r.tokens for r in results) / max(sum(r.seconds for r in results), 1e-9),
            tokens_per_second_plain=sum(r.tokens_plain for r in results)
            / max(sum(r.seconds_plain for r in results), 1e-9),
        )


@dataclass
class Report:
    """All prompts together, and by group. `acceptance_by_slot`: share of target forwards that accepted slot k >= 1."""

    acceptance_length: float
    acceptance_by_slot: list[float]
    tokens_per_second: float
    tokens_per_second_plain: float
    lossless: bool | None
    groups: dict[str, Speeds] = field(default_factory=dict)
    prompts: list[PromptResult] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.tokens_per_second_plain if self.tokens_per_second_plain else 0.0


def acceptance_by_slot(gained: Iterable[int], num_drafted: int) -> list[float]:
    """Share of target forwards that accepted the draft token of slot 1, 2, ..., num_drafted."""
    gained = list(gained)
    return [sum(g > slot for g in gained) / max(len(gained), 1) for slot in range(1, num_drafted + 1)]


class SpeculativeDecoder:
    """A target and its embedding and LM head, ready to decode with any drafter that fits it.

    Args:
        target: the target model.
        layer_ids: target layers that the first drafter reads; further ones are tapped when a drafter wants them.
        dtype: dtype of target and drafter; float32 makes greedy outputs comparable.
        device: where both run.
        trust_remote_code: let the target's repository run its own code.

    Raises:
        ValueError: the target keeps a running state that cannot be taken back, or its vocabulary does not fit together.
    """

    def __init__(
        self,
        target: str,
        layer_ids: Sequence[int],
        *,
        dtype: torch.dtype | str = "float32",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        self._model = load_model(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        self.tokenizer: Any = load_tokenizer(target, trust_remote_code)
        self.target = TargetDecoder(self._model, layer_ids)
        self._targets = {tuple(layer_ids): self.target}
        self.head = FrozenHead.of(self._model)
        self.embedding_rows = int(self.head.embedding.weight.shape[0])  # pyright: ignore[reportIndexIssue, reportArgumentType, reportAttributeAccessIssue]
        check_vocabulary(len(self.tokenizer), self.embedding_rows, self.head.weight.shape[0])
        generation = self._model.generation_config
        stop: Any = generation.eos_token_id if generation is not None else None
        stop = self.tokenizer.eos_token_id if stop is None else stop
        self.stop_ids = frozenset([stop] if isinstance(stop, int) else stop or ())
        self._plain: dict[tuple[int, ...], Decoded] = {}

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits [..., V] of final-normed states [..., H]."""
        logits = self.head.lm_head(hidden)
        if (cap := self.head.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """Prompt ids, the generation prompt included."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def target_for(self, config: Qwen3Config) -> TargetDecoder:
        """The target with the taps that a drafter wants. Raises ValueError when the drafter was made for another."""
        text = self._model.config.get_text_config()
        check_fits(config, text.hidden_size, text.num_hidden_layers, self.embedding_rows, self.head.weight.shape[0])
        ids = tuple(target_layer_ids(config))
        if ids not in self._targets:
            self._targets[ids] = TargetDecoder(self._model, ids)
        return self._targets[ids]

    def decode(
        self,
        drafter: DFlashDraftModel,
        prompt: list[int],
        options: SamplingOptions,
        *,
        seed: int = 0,
        num_speculative_tokens: int | None = None,
    ) -> Decoded:
        """Speculative decoding of one prompt; the drafter has the target's device and dtype."""
        generator = None if options.temperature == 0.0 else torch.Generator(self.target.device).manual_seed(seed)
        return decode_speculative(
            self.target_for(drafter.config),
            drafter,
            self.head.embedding,
            self.lm_head,
            prompt,
            options,
            generator,
            num_speculative_tokens,
        )

    def teacher_forced(
        self,
        drafter: DFlashDraftModel,
        prompt: Sequence[int],
        answer: Sequence[int],
        num_speculative_tokens: int | None = None,
    ) -> list[int]:
        """Tokens gained by a block at every token of `answer` but the last, given the text (see `gains`)."""
        target = self.target_for(drafter.config)
        target.reset()
        ids = [*prompt, *answer]
        _, hidden_TF = target.step(ids, last_only=True)
        return gains(drafter, self.head.embedding, self.lm_head, ids, hidden_TF, len(prompt), num_speculative_tokens)

    def compare(
        self,
        drafter: DFlashDraftModel,
        prompts: Sequence[Prompt],
        options: SamplingOptions,
        *,
        seed: int = 0,
        progress: bool = True,
        num_speculative_tokens: int | None = None,
    ) -> Report:
        """Decode every prompt with the target alone and with `drafter`, which moves to the target's device."""
        self.target_for(drafter.config)
        drafter = drafter.to(device=self.target.device, dtype=self.head.weight.dtype).eval()
        greedy = options.temperature == 0.0
        results: list[PromptResult] = []
        gained: list[int] = []
        for prompt in tqdm(prompts, desc="decode", disable=not progress, leave=False):
            ids = self.encode(prompt.messages)
            plain = self._plain_once(ids, options, seed)
            drafted = self.decode(drafter, ids, options, seed=seed, num_speculative_tokens=num_speculative_tokens)
            difference = first_difference(plain, drafted) if greedy else None
            gained += drafted.gained
            results.append(
                PromptResult(
                    prompt=prompt.last,
                    text=self.tokenizer.decode(drafted.tokens, skip_special_tokens=True),
                    tokens=len(drafted.tokens),
                    acceptance_length=drafted.acceptance_length,
                    forwards=len(drafted.gained),
                    seconds=drafted.seconds,
                    seconds_plain=plain.seconds,
                    tokens_plain=len(plain.tokens),
                    lossless=(difference is None) if greedy else None,
                    difference="" if difference is None else "token {} at a logit gap of {:.2g}".format(*difference),
                    group=prompt.group,
                )
            )
        together = Speeds.of(results)
        groups = dict.fromkeys(r.group for r in results)
        return Report(
            acceptance_length=together.acceptance_length,
            acceptance_by_slot=acceptance_by_slot(gained, num_speculative_tokens or drafter.config.block_size - 1),
            tokens_per_second=together.tokens_per_second,
            tokens_per_second_plain=together.tokens_per_second_plain,
            lossless=all(r.lossless for r in results) if greedy else None,
            groups={group: Speeds.of([r for r in results if r.group == group]) for group in groups},
            prompts=results,
        )

    def _plain_once(self, prompt: list[int], options: SamplingOptions, seed: int) -> Decoded:
        # Several drafters are compared against one decoding of the target.
        key = (*prompt, options.max_new_tokens, int(options.temperature * 1e6), seed)
        if key not in self._plain:
            generator = None if options.temperature == 0.0 else torch.Generator(self.target.device).manual_seed(seed)
            self._plain[key] = decode_plain(self.target, prompt, options, generator)
        return self._plain[key]


def check_decodable(target: str, layer_ids: Sequence[int], trust_remote_code: bool = False) -> None:
    """Raise ValueError where `SpeculativeDecoder` could not decode with the target; loads no weights."""
    config = load_target_config(target, trust_remote_code)
    with torch.device("meta"):
        TargetDecoder(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code), layer_ids)


def check_vocabulary(tokens: int, embedding_rows: int, head_rows: int) -> None:
    """Raise ValueError where the tokenizer or the LM head knows an id that the embedding has no row for."""
    if tokens > embedding_rows:
        raise ValueError(
            f"target: the tokenizer has {tokens} tokens and the embedding {embedding_rows} rows; it is another model's "
            "tokenizer, or its added tokens were never given rows"
        )
    if head_rows > embedding_rows:
        raise ValueError(
            f"target: the LM head has {head_rows} rows and the embedding {embedding_rows}: a token of the head that "
            "the embedding lacks could never be read again"
        )


def check_fits(config: Qwen3Config, hidden_size: int, num_layers: int, embedding_rows: int, head_rows: int) -> None:
    """Raise ValueError unless a drafter of this configuration was made for a target of these sizes."""
    differ = {
        "hidden_size": (config.hidden_size, hidden_size),
        "num_target_layers": (getattr(config, "num_target_layers", None) or num_layers, num_layers),
    }
    wrong = [f"{name} {theirs}, not {ours}" for name, (theirs, ours) in differ.items() if theirs != ours]
    if config.vocab_size not in (head_rows, embedding_rows):
        wrong.append(f"vocab_size {config.vocab_size}, not {embedding_rows}")
    if wrong:
        raise ValueError(f"drafter: it was made for another target: its config says {'; '.join(wrong)}")
    if mask_token_id(config) >= embedding_rows:
        raise ValueError(
            f"drafter: mask_token_id={mask_token_id(config)} has no row in the embedding of {embedding_rows} rows"
        )

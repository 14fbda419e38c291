"""A target that decodes with drafters: loads it once, checks that a drafter fits, measures acceptance and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_lightning.drafter.config import mask_token_id, target_layer_ids
from dflash_lightning.drafter.decoding import (
    Decoded,
    SamplingOptions,
    decode_plain,
    decode_speculative,
    first_difference,
    resolve_num_speculative_tokens,
)
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.objective import LMHead
from dflash_lightning.drafter.walk import gains
from dflash_lightning.prompts import Prompt
from dflash_lightning.target.decode import TargetDecoder
from dflash_lightning.target.loading import FrozenHead, load_model
from dflash_lightning.target.resolve import load_target_config, load_tokenizer


@dataclass
class PromptResult:
    """One prompt decoded both ways; in a batch, seconds are its share of the batch's."""

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
    acceptance_by_slot: list[float] = field(default_factory=list)


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
    batch_size: int = 1
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
        # The target's logits [..., V] of final-normed states [..., H], as training computes them.
        self.lm_head: Callable[[torch.Tensor], torch.Tensor] = LMHead.of(self.head).logits
        self._plain: dict[tuple[Any, ...], list[Decoded]] = {}

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """Prompt ids, the generation prompt included. ValueError where the target's template takes no such chat."""
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise ValueError(f"the target's chat template refuses the conversation: {error}") from error
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
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Decoded:
        """Speculative decoding of one prompt; `on_tokens` hears of its tokens as they are verified."""
        heard = {} if on_tokens is None else {"on_tokens": lambda _, tokens: on_tokens(tokens)}
        return self.decode_batch(
            drafter, [prompt], options, seeds=[seed], num_speculative_tokens=num_speculative_tokens, **heard
        )[0]

    def decode_batch(
        self,
        drafter: DFlashDraftModel,
        prompts: Sequence[list[int]],
        options: SamplingOptions,
        *,
        seeds: Sequence[int] | None = None,
        num_speculative_tokens: int | None = None,
        **more: Any,
    ) -> list[Decoded]:
        """Speculative decoding of several prompts together; the drafter has the target's device and dtype.

        `seeds`: one a prompt (0, 1, ... by default), so what is drawn for a prompt does not depend on its neighbours.
        """
        return decode_speculative(
            self.target_for(drafter.config),
            drafter,
            self.head.embedding,
            self.lm_head,
            prompts,
            options,
            self._generators(options, range(len(prompts)) if seeds is None else seeds),
            num_speculative_tokens,
            **more,
        )

    def _generators(self, options: SamplingOptions, seeds: Sequence[int]) -> list[torch.Generator] | None:
        return None if options.greedy else [torch.Generator(self.target.device).manual_seed(s) for s in seeds]

    def teacher_forced(
        self,
        drafter: DFlashDraftModel,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        num_speculative_tokens: int | None = None,
    ) -> list[list[int]]:
        """For each row, the tokens gained by a block at every token of its answer but the last (see `gains`)."""
        target = self.target_for(drafter.config)
        target.reset()
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        _, hidden_BTF = target.step(rows, last_only=True)
        found = []
        for prompt, ids, hidden_TF in zip(prompts, rows, hidden_BTF, strict=True):
            own = hidden_TF[-len(ids) :]
            found.append(
                gains(drafter, self.head.embedding, self.lm_head, ids, own, len(prompt), num_speculative_tokens)
            )
        return found

    def compare(
        self,
        drafter: DFlashDraftModel,
        prompts: Sequence[Prompt],
        options: SamplingOptions,
        *,
        seed: int = 0,
        batch_size: int = 1,
        progress: bool = True,
        num_speculative_tokens: int | None = None,
    ) -> Report:
        """Decode all prompts, `batch_size` together, with the target alone and with `drafter`.

        The drafter moves to the target's device. Prompt i draws its random numbers from `seed + i`.
        """
        self.target_for(drafter.config).check_batch(batch_size)
        drafter = drafter.to(device=self.target.device, dtype=self.head.weight.dtype).eval()
        num_drafted = resolve_num_speculative_tokens(drafter.config.block_size, num_speculative_tokens)
        results: list[PromptResult] = []
        gained: list[int] = []
        with tqdm(total=len(prompts), desc="decode", disable=not progress, leave=False) as bar:
            for first in range(0, len(prompts), batch_size):
                batch = prompts[first : first + batch_size]
                ids = [self.encode(prompt.messages) for prompt in batch]
                seeds = range(seed + first, seed + first + len(batch))
                plain = self._plain_once(ids, options, seeds)
                drafted = self.decode_batch(
                    drafter, ids, options, seeds=seeds, num_speculative_tokens=num_speculative_tokens
                )
                for each in zip(batch, plain, drafted, strict=True):
                    results.append(self._result(*each, options.greedy, num_drafted))
                    gained += each[2].gained
                bar.update(len(batch))
        together = Speeds.of(results)
        groups = dict.fromkeys(r.group for r in results)
        return Report(
            acceptance_length=together.acceptance_length,
            acceptance_by_slot=acceptance_by_slot(gained, num_drafted),
            tokens_per_second=together.tokens_per_second,
            tokens_per_second_plain=together.tokens_per_second_plain,
            lossless=all(r.lossless for r in results) if options.greedy else None,
            batch_size=batch_size,
            groups={group: Speeds.of([r for r in results if r.group == group]) for group in groups},
            prompts=results,
        )

    def _result(self, prompt: Prompt, plain: Decoded, drafted: Decoded, greedy: bool, num_drafted: int) -> PromptResult:
        difference = first_difference(plain, drafted) if greedy else None
        return PromptResult(
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
            acceptance_by_slot=acceptance_by_slot(drafted.gained, num_drafted),
        )

    def _plain_once(self, prompts: list[list[int]], options: SamplingOptions, seeds: Sequence[int]) -> list[Decoded]:
        # Several drafters are compared against one decoding of the target.
        key = (*map(tuple, prompts), options.max_new_tokens, options.temperature, frozenset(options.stop_ids), *seeds)
        if key not in self._plain:
            self._plain[key] = decode_plain(self.target, prompts, options, self._generators(options, seeds))
        return self._plain[key]


def check_decodable(
    target: str, layer_ids: Sequence[int], trust_remote_code: bool = False, batch_size: int = 1
) -> None:
    """Raise ValueError where `SpeculativeDecoder` could not decode with the target; loads no weights."""
    config = load_target_config(target, trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        TargetDecoder(model, layer_ids).check_batch(batch_size)


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

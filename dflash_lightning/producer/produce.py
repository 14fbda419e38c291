"""From row numbers to packed hidden states: what a worker does with a batch, and what an in-process producer does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_lightning.producer.cache import CacheConfig
from dflash_lightning.producer.rows import BatchRows, RowReader
from dflash_lightning.producer.slots import SlotShape, SlotViews
from dflash_lightning.profiling import span
from dflash_lightning.target.resolve import load_target_config, resolve_target
from dflash_lightning.target.tap import TappedTarget, pack_hidden, pad_rows


@dataclass(frozen=True)
class ProducerConfig:
    """All that a producer needs to know; travels to workers as JSON."""

    target: str
    layer_ids: tuple[int, ...]
    last_hidden_state: bool
    rows: dict[str, str]  # stream name -> folder of its Arrow rows
    max_seq_len: int
    shape: SlotShape
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    compile: bool = False
    num_threads: int | None = None
    cache: CacheConfig | None = None
    kind: str = "dflash_lightning.producer.produce:RowProducer"  # what makes the batches, "module:class"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProducerConfig:
        cache = data["cache"] and CacheConfig(**data["cache"])
        typed = {"layer_ids": tuple(data["layer_ids"]), "shape": SlotShape(**data["shape"]), "cache": cache}
        return cls(**{**data, **typed})


def producer_config(
    target: str,
    layer_ids: Sequence[int],
    *,
    last_hidden_state: bool,
    rows: dict[str, str],
    token_budget: int,
    max_seq_len: int,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
    num_threads: int | None = None,
) -> ProducerConfig:
    """What producers of a run need, with the sizes that follow from the target's config.

    Args:
        target: as for `resolve_target`.
        dtype: of target and hidden states: a torch dtype's name, or "auto" (as the target is stored).
    """
    config = load_target_config(target, trust_remote_code)
    text = config.get_text_config()
    if dtype == "auto":
        stored = getattr(config, "dtype", None) or text.dtype or torch.float32
        dtype = str(stored).removeprefix("torch.")
    hidden = text.hidden_size
    return ProducerConfig(
        target=resolve_target(target),
        layer_ids=tuple(layer_ids),
        last_hidden_state=last_hidden_state,
        rows=rows,
        max_seq_len=max_seq_len,
        shape=SlotShape(token_budget, len(layer_ids) * hidden, hidden if last_hidden_state else 0, dtype),
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        compile=compile,
        num_threads=num_threads,
    )


class TargetLoadError(RuntimeError):
    """The target could not be loaded when a batch asked for it; asking again would not help."""


class Producer(Protocol):
    """Makes batches in two stages; the second may run beside the next batch's first."""

    def forward(self, stream: str, numbers: Sequence[int]) -> Any:
        """Run the target over rows `numbers` of `stream`."""
        ...

    def pack(self, made: Any, out: SlotViews) -> list[int]:
        """Write the result of `forward` into a slot; tokens of each row, 0 for a dropped one."""
        ...


def make_producer(
    config: ProducerConfig, device: torch.device | str, before_load: Callable[[], None] = lambda: None
) -> Producer:
    """The producer that `config.kind` names, behind the hidden-state cache where there is one.

    Args:
        before_load: called before the target is loaded, which a cache may put off for ever.
    """

    def load() -> Producer:
        before_load()
        module, name = config.kind.split(":")
        return getattr(importlib.import_module(module), name)(config, device)

    if config.cache is None:
        return load()
    from dflash_lightning.producer.cached import CachedProducer  # it needs this module

    return CachedProducer(config, load)


@dataclass
class _Forwarded:
    """A padded batch after the target's forward pass."""

    rows: BatchRows
    taps: list[Tensor]  # each [B, S, H]
    done: Any  # CUDA event of the forward pass, or None


class RowProducer:
    """Holds one target replica on one device and the rows, and fills slots.

    Args:
        config: see `ProducerConfig`.
        device: where the target runs.
    """

    def __init__(self, config: ProducerConfig, device: torch.device | str) -> None:
        self.config = config
        self.device = torch.device(device)
        self.rows = RowReader(config.rows, config.max_seq_len)
        self.target = TappedTarget(
            config.target,
            config.layer_ids,
            last_hidden_state=config.last_hidden_state,
            device=device,
            dtype=config.shape.torch_dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
        if config.compile:
            self.target.compile()
        # Packing and the copy to the host run beside the next forward pass.
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def produce(self, stream: str, numbers: Sequence[int], out: SlotViews) -> list[int]:
        """`forward` and `pack` in one go."""
        return self.pack(self.forward(stream, numbers), out)

    def forward(self, stream: str, numbers: Sequence[int]) -> _Forwarded:
        with span("target.load_batch"):
            rows = self.rows.load(stream, numbers)
            assert sum(rows.lengths) <= self.config.shape.max_tokens, "the plan's token budget is the slot's size"
            ids_BS = pad_rows(rows.ids)
        with span("target.model_forward"):
            taps = self.target.forward(ids_BS)
            event = None
            if self._side is not None:
                event = torch.cuda.Event()
                event.record()
                # sync: a worker has nothing to do but this forward pass, and its time must not be booked elsewhere.
                event.synchronize()
        return _Forwarded(rows, taps, event)

    @torch.inference_mode()
    def pack(self, made: _Forwarded, out: SlotViews) -> list[int]:
        if self._side is None:
            return self._pack(made, out)
        with torch.cuda.stream(self._side):
            self._side.wait_event(made.done)
            for tap in made.taps:
                tap.record_stream(self._side)  # its memory must not be reused while this stream reads it
            return self._pack(made, out)

    def _pack(self, made: _Forwarded, out: SlotViews) -> list[int]:
        with span("target.pack_hidden"):
            rows, lengths = made.rows, made.rows.lengths
            for tap in made.taps:
                if tap.shape[0] != len(lengths) or tap.shape[1] < max(lengths):
                    raise ValueError(
                        f"rows {list(rows.numbers)} of {rows.stream}: {max(lengths)} tokens in {len(lengths)} rows, "
                        f"but {tap.shape[1]} hidden states in {tap.shape[0]} rows"
                    )
            for index, layer in self._bad_rows(made.taps, lengths).items():
                print(
                    f"dropped row {rows.numbers[index]} of {rows.stream}: the target's layer {layer} gave values that "
                    "are not finite",
                    flush=True,
                )
                lengths[index] = 0
            total = sum(lengths)
            views = out.head(total)
            rows.write_tokens(lengths, views)
            taps, last = made.taps, views.last_hidden_state
            if total and last is not None:
                self._write(taps[-1:], lengths, last)
            if total:
                self._write(taps[:-1] if last is not None else taps, lengths, views.hidden_states)
        if self._side is not None:
            with span("target.copy_to_host"):
                self._side.synchronize()  # sync: the slot may be announced only when the copy has landed
        return lengths

    def _write(self, taps: Sequence[Tensor], lengths: Sequence[int], out: Tensor) -> None:
        if self._side is None:
            pack_hidden(taps, lengths, out)
        else:
            out.copy_(pack_hidden(taps, lengths), non_blocking=True)

    def _bad_rows(self, taps: Sequence[Tensor], lengths: Sequence[int]) -> dict[int, int]:
        """Rows with a value that is not finite -> the first target layer that gave one."""
        # One float32 sum a token shows any infinity or NaN of its H values. sync: one small copy a batch.
        sums_LBS = torch.stack([tap.sum(-1, dtype=torch.float32) for tap in taps]).cpu()
        if bool(torch.isfinite(sums_LBS).all()):
            return {}
        bad: dict[int, int] = {}
        for layer, sums_BS in zip(self.target.tap_ids, sums_LBS, strict=True):
            for row, length in enumerate(lengths):
                if not torch.isfinite(sums_BS[row, :length]).all():
                    bad.setdefault(row, layer)
        return bad

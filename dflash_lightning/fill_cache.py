"""`dflash prepare --hidden-states`: fill the hidden-state cache of a later `dflash fit` without training."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_lightning.producer.plan import BatchPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this step; those that `fit` has too must be given the same values there."""
    group = parser.add_argument_group("hidden states", "run the target over the rows and keep its hidden states")
    group.add_argument("--hidden-states", action="store_true", help="fill --cache-dir for `dflash fit`")
    group.add_argument("--cache-dir", help="folder of the cache; give it as data.cache_dir")
    group.add_argument("--cache-limit-gb", type=float, help="most GB (10^9 bytes) that it may hold")
    group.add_argument("--num-layers", type=int, default=5, help="drafter layers, for the default layer ids (5)")
    group.add_argument("--target-layer-ids", type=int, nargs="+", help="target layers to keep, counted from 0")
    group.add_argument("--last-hidden-state", action="store_true", help="keep the last layer too (losses but `ce`)")
    group.add_argument("--mask-token-id", type=int, help="rows that hold it are left out (as fit chooses it)")
    group.add_argument("--token-budget", type=int, default=49152, help="most padded tokens of a batch (49152)")
    group.add_argument("--num-buckets", type=int, default=6, help="length buckets of the batch plan (6)")
    group.add_argument("--seed", type=int, default=0, help="data.seed of the run (0)")
    group.add_argument("--val-fraction", type=float, default=0.0, help="data.val_fraction of the run (0)")
    group.add_argument("--target-devices", nargs="+", default=["cpu"], help="CUDA indices or cpu, a replica each (cpu)")
    group.add_argument("--target-dtype", default="auto", help="auto (as stored) or a torch dtype's name")
    group.add_argument("--attn-implementation", help="the target's attention in transformers")
    group.add_argument("--target-compile", action="store_true", help="compile the target's layers")


def run(args: argparse.Namespace, rows_folder: str) -> None:
    """Make what is not in the cache yet; started again after an interruption it goes on.

    Args:
        args: `add_arguments`' options, and `target`, `trust_remote_code`, `max_seq_len`, `min_supervised_tokens`.
        rows_folder: a prepared folder.

    Raises:
        ValueError: options that make no sense, or no room for all of it (what fits is kept).
        ProducerError: a producer failed.
    """
    from tqdm import tqdm

    from dflash_lightning.placement import threads_per_worker
    from dflash_lightning.producer.cached import StateLookup, cache_report, with_cache
    from dflash_lightning.producer.pool import ProducerPool
    from dflash_lightning.producer.produce import producer_config
    from dflash_lightning.producer.slots import check_memory

    devices = check(args)
    layer_ids = _layer_ids(args)
    plans = _plans(args, rows_folder)
    config = producer_config(
        args.target,
        layer_ids,
        last_hidden_state=args.last_hidden_state,
        rows={name: str(rows_folder) for name in plans},
        token_budget=args.token_budget,
        max_seq_len=args.max_seq_len,
        dtype=args.target_dtype,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
        compile=args.target_compile,
        num_threads=threads_per_worker(devices),
    )
    config = with_cache(
        config, args.cache_dir, mode="write-through", limit_gb=args.cache_limit_gb, writers=len(devices)
    )
    print(cache_report(config, plans), flush=True)
    lookup = StateLookup(config)
    batches = [(name, number, plan[number]) for name, plan in plans.items() for number in range(len(plan))]
    wanted = batches
    if not lookup.is_empty():
        wanted = tqdm(batches, desc="looking for batches that are there", unit="batch")
    missing: dict[str, list[tuple[int, Any]]] = {name: [] for name in plans}
    for name, number, rows in wanted:
        if not lookup.holds(name, rows):
            missing[name].append((number, rows))
    absent = sum(map(len, missing.values()))
    if not absent:
        print(f"all {len(batches):,} batches are there", flush=True)
        return
    slots = {name: 2 * len(devices) + 1 for name in plans}
    check_memory(config.shape, sum(slots.values()))
    pool = ProducerPool(config, devices, slots, max_restarts=3)
    done = tqdm(desc="hidden states", unit="batch", initial=len(batches) - absent, total=len(batches))
    try:
        for name, ours in missing.items():
            stream = pool.open(name, iter(ours), [number for number, _ in ours])
            for _, rows in ours:
                stream.get().release()
                if not lookup.holds(name, rows):
                    raise ValueError(
                        f"--cache-dir={args.cache_dir}: not all of it could be stored; the message above says why. "
                        "What is there is kept: make room or raise --cache-limit-gb, and start this again"
                    )
                done.update()
    finally:
        done.close()
        pool.close()


def check(args: argparse.Namespace) -> list[int | str]:
    """The devices of `--target-devices`. Raises ValueError for options that make no sense."""
    import torch

    from dflash_lightning.producer.cache import check_cache_options
    from dflash_lightning.row_sets import check_val_fraction
    from dflash_lightning.target.loading import check_dtype

    if not args.cache_dir:
        raise ValueError("--hidden-states needs --cache-dir, the folder that keeps them")
    check_cache_options(args.cache_dir, "write-through", args.cache_limit_gb)
    check_plan(args)
    check_dtype("--target-dtype", args.target_dtype)
    check_val_fraction("--val-fraction", args.val_fraction)
    available = torch.cuda.device_count()
    devices: list[int | str] = []
    for device in args.target_devices:
        if device != "cpu" and not (device.isdecimal() and int(device) < available):
            raise ValueError(f"--target-devices: {device!r} is neither 'cpu' nor one of {available} CUDA devices")
        devices.append(device if device == "cpu" else int(device))
    return devices


def check_plan(args: argparse.Namespace) -> None:
    """Raise ValueError for what the batch plan would refuse when all rows are made."""
    for option, value in (("token-budget", args.token_budget), ("num-buckets", args.num_buckets)):
        if value < 1:
            raise ValueError(f"--{option}={value}: at least 1")
    if args.token_budget < args.max_seq_len:
        raise ValueError(
            f"--token-budget={args.token_budget} is smaller than --max-seq-len={args.max_seq_len}: the longest "
            "row must fit a batch"
        )


def _layer_ids(args: argparse.Namespace) -> list[int]:
    from dflash_lightning.drafter.config import check_target_layer_ids, default_target_layer_ids
    from dflash_lightning.target.resolve import load_target_config

    total = load_target_config(args.target, args.trust_remote_code).get_text_config().num_hidden_layers
    if args.target_layer_ids is None:
        return default_target_layer_ids(total, args.num_layers)
    check_target_layer_ids(args.target_layer_ids, total)
    return args.target_layer_ids


def _plans(args: argparse.Namespace, rows_folder: str) -> dict[str, BatchPlan]:
    """The batch plans that `fit` will make of the folder: "train", and "val" where a share is held out."""
    from dflash_lightning.producer.plan import BatchPlan
    from dflash_lightning.row_sets import RowSets
    from dflash_lightning.target.mask_token import choose_mask_token
    from dflash_lightning.target.resolve import load_target_config, load_tokenizer

    mask_token_id = args.mask_token_id
    if mask_token_id is None:
        vocab_size = load_target_config(args.target, args.trust_remote_code).get_text_config().vocab_size
        mask_token_id = choose_mask_token(load_tokenizer(args.target, args.trust_remote_code), vocab_size)
    row_sets = RowSets(
        target=args.target,
        train=[rows_folder],
        val=[],
        max_seq_len=args.max_seq_len,
        min_supervised_tokens=args.min_supervised_tokens,
        trust_remote_code=args.trust_remote_code,
        val_fraction=args.val_fraction,
    )

    def lengths(name: str) -> Any:
        return row_sets.load(name, rows_folder, mask_token_id).lengths

    sizes = {"token_budget": args.token_budget, "num_buckets": args.num_buckets}
    plans = {"train": BatchPlan(lengths("train"), seed=args.seed, **sizes)}
    if args.val_fraction:
        plans["val"] = BatchPlan(lengths("val"), shuffle=False, **sizes)
    return plans

"""The real pool, slots, loader and ranks with stages that only wait as long as the reference profile says, 100x faster.

Five producers (forward 0.121 s within +-8 %, pack 0.015 s) feed three ranks in lockstep (forward 0.027 s, backward
0.021 s). The bound is producers / mean forward time. Efficiency: rate of producer completions between the first quarter
and the last (minus half the queue) over the bound.

    python benchmarks/pipeline_replay.py [--batches 360] [--producers 5] [--ranks 3] [--megabytes 2 50]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dflash_lightning.batch import BatchSpec, Cursor  # noqa: E402
from dflash_lightning.loader import HiddenStateLoader, LoaderConfig  # noqa: E402
from dflash_lightning.pipeline.rank_steps import GroupSteps, OwnSteps  # noqa: E402
from dflash_lightning.pipeline.windows import Settings, Window  # noqa: E402
from dflash_lightning.producer.plan import BatchPlan  # noqa: E402
from dflash_lightning.producer.pool import ProducerPool  # noqa: E402
from dflash_lightning.producer.produce import ProducerConfig  # noqa: E402
from dflash_lightning.producer.ranks import RankSource  # noqa: E402
from dflash_lightning.producer.slots import SlotShape, SlotViews  # noqa: E402
from dflash_lightning.profiling import process_stats, span  # noqa: E402

# Workers inherit it. At 1 the all-reduce of gloo on a busy machine is already 4 % of the backward time.
SLOWER = float(os.environ.get("DFLASH_REPLAY_SLOWER", "1"))
FORWARD, FORWARD_SPREAD, PACK = 0.121 * SLOWER, 0.08, 0.015 * SLOWER
DRAFTER_FORWARD, DRAFTER_BACKWARD = 0.027 * SLOWER, 0.021 * SLOWER
TOKENS = 512
PREFETCH = 2


class WaitingProducer:
    """Waits where a real producer works; writes real bytes into the slot inside the time of packing."""

    def __init__(self, config: ProducerConfig, device: Any) -> None:
        shape = config.shape
        self.hidden = torch.zeros(shape.max_tokens, shape.width, dtype=shape.torch_dtype)
        self.random = random.Random(time.monotonic_ns())

    def forward(self, stream: str, numbers: Sequence[int]) -> None:
        with span("target.model_forward"):
            time.sleep(FORWARD * self.random.uniform(1 - FORWARD_SPREAD, 1 + FORWARD_SPREAD))

    def pack(self, made: None, out: SlotViews) -> list[int]:
        with span("target.pack_hidden"):
            started = time.monotonic()
            out.hidden_states.copy_(self.hidden)
            out.input_ids.fill_(1)
            out.loss_mask.fill_(1)
            time.sleep(max(0.0, PACK - (time.monotonic() - started)))
        return [len(out.input_ids)]


def run_rank(options: dict[str, Any]) -> None:
    """One rank: its loader, and a step that waits and then meets the other ranks."""
    torch.set_num_threads(1)
    rank, world = options["rank"], options["ranks"]
    folder = Path(options["folder"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    width = options["megabytes"] * 2**20 // (TOKENS * 2)
    plan = BatchPlan(np.full(options["batches"], TOKENS), token_budget=TOKENS, num_buckets=1)
    ranks = tuple(range(world))
    finished: list[float] = []
    if rank == 0:
        shape = SlotShape(TOKENS, width, 0, "bfloat16")
        kind = "benchmarks.pipeline_replay:WaitingProducer"
        config = ProducerConfig("none", (0,), False, {}, TOKENS, shape, num_threads=1, kind=kind)
        pool = ProducerPool(
            config, ["cpu"] * options["producers"], {"train": options["queue_depth"]}, options["min_ready"],
            ranks=ranks, world_size=world,
        )  # fmt: skip
        finish = pool._queue.finish

        def record(job: Any, lengths: list[int]) -> None:
            finished.append(time.monotonic())
            finish(job, lengths)

        pool._queue.finish = record
        while not all(w.ready for w in pool.workers):
            time.sleep(0.05)
        source: Any = pool
        path = [pool.server.path if pool.server is not None else ""]
    else:
        source, path = None, [""]
    dist.broadcast_object_list(path)
    source = source or RankSource(path[0], rank)
    spec = BatchSpec((0,), False, 4, 32, width)
    loader_config = LoaderConfig("train", rank, world, 1, 0, PREFETCH, ranks)
    loader = HiddenStateLoader(
        source, lambda _e: plan, spec, loader_config, lambda: Cursor(0, 0, 0), torch.device("cpu")
    )
    meet = torch.zeros(1)
    started = time.monotonic()
    profile = Profile(source, options)
    for step, _ in enumerate(loader):
        with span("drafter.forward"):
            time.sleep(DRAFTER_FORWARD)
        with span("drafter.backward"):
            time.sleep(DRAFTER_BACKWARD)
            dist.all_reduce(meet)
        profile.end_step(step)
    window = profile.close()
    waited = sum(t.total for s, t in _stats().items() if s == "drafter.queue_wait")
    seconds = time.monotonic() - started
    if rank == 0:
        first, last = len(finished) // 4, len(finished) - options["queue_depth"] // 2
        rate = (last - first) / (finished[last - 1] - finished[first - 1])
        bound = options["producers"] / FORWARD
        result = {
            "efficiency": rate / bound,
            "whole_run": options["batches"] / seconds / bound,
            "wait_share": waited / seconds,
            "tokens_per_s": window.tokens / window.wall,
        }
        (folder / "window.json").write_text(json.dumps(window.to_json()))
        (folder / "result.json").write_text(json.dumps(result))
    loader.close()
    dist.barrier()
    source.close()


class Profile:
    """The window that StageProfilerCallback would close over the last three quarters of the steps."""

    def __init__(self, source: Any, options: dict[str, Any]) -> None:
        self.source, self.options = source, options
        self.steps = OwnSteps()
        self.first = options["batches"] // options["ranks"] // 4
        self.count = 0
        self.started = 0.0

    def end_step(self, step: int) -> None:
        self.steps.end_batch()
        self.count += 1
        if step + 1 == self.first:
            process_stats().window()
            self.steps.take()
            for stats in self.source.lanes().values():
                stats.window()
            self.count, self.started = 0, time.perf_counter()

    def close(self) -> Window:
        wall = time.perf_counter() - self.started
        rank, ranks = self.options["rank"], self.options["ranks"]
        lanes = {f"rank{rank}": process_stats().window()}
        lanes.update({name: stats.window() for name, stats in self.source.lanes().items()})
        group, steps = GroupSteps(range(ranks)), self.steps.take()
        group.add(steps)
        if rank:
            self.source.send_profile({"totals": {}, "events": []}, steps, True)
        else:
            profiles = self.source.rank_profiles()
            while not all(p.finished for p in profiles.values()):
                time.sleep(0.01)
            for profile in profiles.values():
                group.add(profile.take_steps())
        settings = Settings(
            self.options["producers"], ranks, self.options["queue_depth"], self.options["min_ready"], PREFETCH
        )
        joined = dict(zip(("group_steps", "group_wait", "group_backward"), group.take(), strict=True))
        tokens = self.count * ranks * TOKENS
        return Window(1, 0.0, wall, self.count, lanes, tokens, self.count * ranks, settings=settings, **joined)


def _stats() -> dict[str, Any]:
    return process_stats().cumulative()


def replay(**options: Any) -> dict[str, float]:
    """One run in fresh processes; its efficiency, that of the whole run, rank 0's wait share, and tokens/s."""
    return replay_with_window(**options)[0]


def replay_with_window(**options: Any) -> tuple[dict[str, float], Window]:
    """One run in fresh processes: its figures and its profile window."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child"]
        options = {"folder": folder, **options}
        children = [
            subprocess.Popen([*command, json.dumps({**options, "rank": rank})], cwd=ROOT)
            for rank in range(options["ranks"])
        ]
        codes = [child.wait(timeout=300) for child in children]
        assert codes == [0] * len(codes), codes
        window = Window.from_json(json.loads((Path(folder) / "window.json").read_text()))
        return json.loads((Path(folder) / "result.json").read_text()), window


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=360)
    parser.add_argument("--producers", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[2, 50])
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_rank(json.loads(args.child))
        return
    shape = {"batches": args.batches, "producers": args.producers, "ranks": args.ranks}
    cases = {f"{m} MB": {"megabytes": m, "queue_depth": 60, "min_ready": 1} for m in args.megabytes}
    small = min(args.megabytes)
    cases["min_ready 10"] = {"megabytes": small, "queue_depth": 60, "min_ready": 10}
    cases["queue depth 20"] = {"megabytes": small, "queue_depth": 20, "min_ready": 1}
    results = {}
    for name, case in cases.items():
        results[name] = replay(**shape, **case)
        print(f"{name:<16} {' '.join(f'{k} {v:.3f}' for k, v in results[name].items())}", flush=True)
    print(
        "RESULT",
        json.dumps(
            {
                "efficiency": round(min(results[f"{m} MB"]["efficiency"] for m in args.megabytes), 4),
                "efficiency_min_ready_10": round(results["min_ready 10"]["efficiency"], 4),
                "efficiency_queue_20": round(results["queue depth 20"]["efficiency"], 4),
            }
        ),
    )


if __name__ == "__main__":
    main()

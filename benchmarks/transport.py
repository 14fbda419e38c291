"""GB/s of 50 MB batches through the pool's slots, against a plain memcpy and against `torch.multiprocessing.Queue`.

In each case a producer process writes every byte once and a consumer process gets the batch without copying it again.
All in one run, one thread each, the best of several rounds.

    python benchmarks/transport.py [--megabytes 50] [--batches 40] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dflash_lightning.producer.pool import ProducerPool  # noqa: E402
from dflash_lightning.producer.produce import ProducerConfig  # noqa: E402
from dflash_lightning.producer.slots import SlotShape, SlotViews  # noqa: E402

TOKENS = 1024
SLOTS = 4


class CopyProducer:
    """Copies the same bytes into every slot: what a worker's packing costs at least."""

    def __init__(self, config: ProducerConfig, device: Any) -> None:
        shape = config.shape
        self.hidden = torch.ones(shape.max_tokens, shape.width, dtype=shape.torch_dtype)

    def forward(self, stream: str, numbers: Sequence[int]) -> None:
        return None

    def pack(self, made: None, out: SlotViews) -> list[int]:
        out.hidden_states.copy_(self.hidden)
        return [TOKENS]


def through_slots(pool: ProducerPool, batches: int) -> float:
    """Seconds for `batches` batches through the pool, the first left out."""
    stream = pool.open("train", iter([(n, [0]) for n in range(batches + 1)]), list(range(batches + 1)))
    stream.get().release()
    started = time.perf_counter()
    for _ in range(batches):
        batch = stream.get()
        assert batch.views.hidden_states[-1, -1] == 1
        batch.release()
    stream.close()
    return time.perf_counter() - started


def _put(queue: Any, width: int, batches: int) -> None:
    torch.set_num_threads(1)
    hidden = torch.ones(TOKENS, width, dtype=torch.bfloat16)
    for _ in range(batches + 1):
        queue.put(hidden.clone())
    time.sleep(5)  # tensors in a queue are lost when their producer ends


def through_torch_queue(width: int, batches: int) -> float:
    """The same through a bounded `torch.multiprocessing.Queue`."""
    context = mp.get_context("spawn")
    queue = context.Queue(SLOTS)
    process = context.Process(target=_put, args=(queue, width, batches), daemon=True)
    process.start()
    queue.get()
    started = time.perf_counter()
    for _ in range(batches):
        assert queue.get()[-1, -1] == 1
    seconds = time.perf_counter() - started
    process.terminate()
    process.join()
    return seconds


def memcpy(width: int, batches: int) -> float:
    """Seconds of plain copies of the same bytes between buffers as many as there are slots."""
    source = torch.ones(TOKENS, width, dtype=torch.bfloat16)
    targets = [torch.zeros_like(source) for _ in range(SLOTS)]
    started = time.perf_counter()
    for n in range(batches):
        targets[n % SLOTS].copy_(source)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    width = args.megabytes * 2**20 // (TOKENS * 2)
    config = ProducerConfig(
        "none", (0,), False, {}, TOKENS, SlotShape(TOKENS, width, 0, "bfloat16"), num_threads=1,
        kind="benchmarks.transport:CopyProducer",
    )  # fmt: skip
    pool = ProducerPool(config, ["cpu"], {"train": SLOTS})
    through_slots(pool, SLOTS)  # every page of every slot is touched once
    seconds: dict[str, list[float]] = {"memcpy": [], "slots": [], "torch queue": []}
    for _ in range(args.rounds):
        seconds["memcpy"].append(memcpy(width, args.batches))
        seconds["slots"].append(through_slots(pool, args.batches))
        seconds["torch queue"].append(through_torch_queue(width, args.batches))
    pool.close()
    gigabytes = args.batches * args.megabytes * 2**20 / 1e9
    rates = {name: gigabytes / min(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:<12} {rate:6.2f} GB/s")
    result = {
        "vs_memcpy": round(rates["slots"] / rates["memcpy"], 3),
        "vs_torch_queue": round(rates["slots"] / rates["torch queue"], 2),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()

"""A producer that fails the first time it is asked for a batch; used by producer/test_pool.py in worker processes."""

from __future__ import annotations

from pathlib import Path

from dflash_lightning.producer.produce import RowProducer


class FlakyProducer(RowProducer):
    def forward(self, stream, numbers):
        mark = Path(self.config.target).parent / f"tried-{'-'.join(map(str, numbers))}"
        if not mark.exists():
            mark.touch()
            raise RuntimeError("fails once")
        return super().forward(stream, numbers)

"""Worker processes, one a target device, and the bounded queue of batches that they fill for the ranks of a node.

One thread starts the workers, hands out batches, takes results and serves the other ranks. It lives as long as the
pool, because the kernel's parent-death signal follows the thread that started a process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from typing import Any

from dflash_lightning.producer.process import WorkerDiedError, WorkerFailedError, WorkerProcess
from dflash_lightning.producer.produce import ProducerConfig
from dflash_lightning.producer.queue import Job, SlotQueue, StreamState
from dflash_lightning.producer.ranks import RankProfile, RankServer
from dflash_lightning.producer.slots import SlotMemory
from dflash_lightning.producer.source import Entry, ProducedBatch, ProducerError, Stream
from dflash_lightning.profiling import ProfileStats

# Batches a worker holds: the running one and the next, so that it never waits for an answer between two.
_BATCHES_PER_WORKER = 2
_POLL_SECONDS = 0.5
# A worker beats every few seconds, also while it loads; one that is silent for so long hangs in a driver or is stopped.
_SILENCE_SECONDS = 120.0
_MAX_BACKOFF_SECONDS = 30.0


class ProducerPool:
    """Feeds the streams of a node's ranks from worker processes; lives in local rank 0.

    Args:
        config: what every worker needs.
        devices: one worker an entry: a CUDA index or "cpu".
        slots: stream name -> batches of it that may be produced and not yet taken.
        min_ready: `get` waits until so many batches are ready; clamped to what the slots allow, ignored at the end.
        ranks: global ranks of this node, the pool's own first.
        world_size: number of ranks on all nodes; batch n goes to rank n % world_size.
        max_restarts: how often the worker of a device is started again after a death by signal.
    """

    def __init__(
        self,
        config: ProducerConfig,
        devices: Sequence[int | str],
        slots: dict[str, int],
        min_ready: int = 1,
        *,
        ranks: Sequence[int] = (0,),
        world_size: int = 1,
        max_restarts: int = 0,
    ) -> None:
        self._config = config
        self._ranks = tuple(ranks)
        self._world_size = world_size
        self._max_restarts = max_restarts
        self._condition = threading.Condition()
        self._error: ProducerError | None = None
        self._closing = False
        self._generations: dict[str, int] = {}
        self._queue = SlotQueue(slots, min_ready)
        self.memory = SlotMemory(config.shape, self._queue.count)
        self.workers: list[WorkerProcess] = []
        self._devices = list(devices)
        self._restarts = [0] * len(self._devices)
        self._due: dict[int, float] = {}  # index of a dead worker -> when it starts again
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self.server: RankServer | None = None
        if len(self._ranks) > 1:
            self.server = RankServer(self._queue, self.memory, expected=len(self._ranks) - 1)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-producer-pool", daemon=True)
        self._thread.start()
        self._started.wait()
        atexit.register(self.close)

    # Called by the loader's threads and the trainer's main thread of this rank.

    def open(self, name: str, entries: Iterable[Entry], numbers: Sequence[int]) -> Stream:
        with self._condition:
            generation = self._generations.get(name, 0) + 1
            self._generations[name] = generation
            self._queue.open(StreamState(name, generation, iter(entries), self._world_size, set(self._ranks)))
        self._wake()
        return _PoolStream(self, name, generation, numbers)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def ready(self, name: str) -> tuple[int, int]:
        with self._condition:
            return self._queue.ready_count(name), self._queue.capacity[name]

    def lanes(self) -> dict[str, ProfileStats]:
        return {f"producer{i}": worker.stats for i, worker in enumerate(self.workers)}

    def rank_profiles(self) -> dict[int, RankProfile]:
        """What the node's other ranks have reported, by global rank; all of them, also before their first report."""
        server = self.server
        return {r: server.profiles.setdefault(r, RankProfile()) for r in self._ranks[1:]} if server is not None else {}

    def release(self, name: str, slot: int) -> None:
        with self._condition:
            self._queue.free(name, slot)
        self._wake()

    def close(self) -> None:
        with self._condition:
            already, self._closing = self._closing, True
            self._condition.notify_all()
        atexit.unregister(self.close)
        if already:
            return
        self._wake()
        self._thread.join(timeout=8)
        self.memory.close()

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b"x")
        except OSError:  # full: a wake-up is already on its way; closed: nobody to wake
            pass

    # The pool's own thread.

    def _run(self) -> None:
        try:
            for device in self._devices:
                self.workers.append(WorkerProcess(self._config, device, self.memory))
            self._started.set()
            while not self._closing and self._error is None:
                try:
                    self._turn()
                except WorkerFailedError:
                    raise
                except WorkerDiedError as death:
                    self._bury(death)
        except ProducerError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ProducerError(f"the producer pool failed: {error!r}"))
        finally:
            self._started.set()
            if self.server is not None:
                self.server.close(self._error)
            deadline = time.monotonic() + 3
            for index, worker in enumerate(self.workers):
                if index not in self._due:
                    worker.end(deadline)
            os.close(self._wake_r)
            os.close(self._wake_w)

    def _turn(self) -> None:
        self._restart_due()
        self._hand_out()
        alive = {w.connection: w for i, w in enumerate(self.workers) if i not in self._due}
        waiters: list[Any] = [*alive, self._wake_r, *(self.server.waiters() if self.server else ())]
        for source in wait(waiters, timeout=_POLL_SECONDS):
            if source == self._wake_r:
                os.read(self._wake_r, 4096)
            elif source in alive:
                self._receive(alive[source])  # pyright: ignore[reportArgumentType]
            elif self.server is not None:
                with self._condition:
                    self.server.receive(source)
        for worker in alive.values():
            if time.monotonic() - worker.last_heard > _SILENCE_SECONDS:
                worker.process.kill()
                worker.process.wait()
                raise WorkerDiedError(f"{worker} was silent for {_SILENCE_SECONDS:.0f} s and was killed")
        if self.server is not None:
            with self._condition:
                self.server.serve()

    def _hand_out(self) -> None:
        alive = [w for i, w in enumerate(self.workers) if i not in self._due]
        while True:
            free = [w for w in alive if len(w.held) < _BATCHES_PER_WORKER]
            if not free:
                return
            with self._condition:
                job = self._queue.next_job()
                self._condition.notify_all()  # a stream may have found its end
            if job is None:
                return
            others = [w for w in free if w is not job.avoid]
            worker = min(others or free, key=lambda w: (len(w.held), not w.ready))
            worker.held.append(job)
            worker.send({**job.request(), "generation": job.stream.generation})

    def _receive(self, worker: WorkerProcess) -> None:
        message = worker.receive()
        if message["op"] == "error":
            raise WorkerFailedError(f"{worker} failed:\n{message['traceback']}")
        if message["op"] == "beat":
            return
        worker.ready = True
        if message["op"] == "ready":
            return
        job: Job = next(j for j in worker.held if j.slot == message["slot"])
        worker.held.remove(job)
        if message["spans"] is not None:
            worker.stats.absorb(message["spans"])
        if message["op"] == "failed":
            job.attempts += 1
            if job.attempts > 1:
                where = f"rows {job.rows} of {job.stream.name}"
                raise WorkerFailedError(f"{worker} failed on {where}:\n{message['traceback']}")
            job.avoid = worker
            with self._condition:
                self._queue.retries.append(job)
            return
        with self._condition:
            self._queue.finish(job, message["lengths"])
            self._condition.notify_all()

    def _bury(self, death: WorkerDiedError) -> None:
        """Give a dead worker's batches to others and start it again later. Raises when that is not allowed."""
        for index, worker in enumerate(self.workers):
            if index in self._due or worker.process.poll() is None:
                continue
            code = worker.process.returncode
            if code >= 0:
                raise WorkerFailedError(str(death))
            if self._restarts[index] >= self._max_restarts:
                allowed = f" after {self._max_restarts} restarts" if self._max_restarts else ""
                raise WorkerFailedError(f"{worker.how_it_ended()}{allowed} (data.max_restarts={self._max_restarts})")
            worker.connection.close()
            with self._condition:
                # In plan order, before anything new: some rank may already wait for them.
                self._queue.retries.extend(worker.held)
            worker.held = []
            backoff = min(_MAX_BACKOFF_SECONDS, 0.5 * 2 ** self._restarts[index])
            self._restarts[index] += 1
            self._due[index] = time.monotonic() + backoff
            print(f"{worker.how_it_ended()}; it starts again in {backoff:.1f} s", flush=True)

    def _restart_due(self) -> None:
        for index, when in list(self._due.items()):
            if time.monotonic() >= when:
                old = self.workers[index]
                self.workers[index] = WorkerProcess(self._config, self._devices[index], self.memory)
                self.workers[index].stats = old.stats
                del self._due[index]

    def _fail(self, error: ProducerError) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()


class _PoolStream:
    """Local rank 0's view of a stream."""

    def __init__(self, pool: ProducerPool, name: str, generation: int, numbers: Sequence[int]) -> None:
        self._pool = pool
        self._name = name
        self._generation = generation
        self._numbers = iter(numbers)
        self._closed = False

    def get(self) -> ProducedBatch:
        number = next(self._numbers)
        pool = self._pool
        with pool._condition:
            while True:
                pool.check()
                if self._closed or pool._closing:
                    raise StopIteration
                job = pool._queue.take(self._name, self._generation, number)
                if job is not None:
                    break
                pool._condition.wait(_POLL_SECONDS)
        if pool.server is not None:
            pool._wake()  # fewer are ready now, or the stream has come to its end for others
        views = pool.memory.views(job.slot)
        return ProducedBatch(number, job.rows, job.lengths, views, lambda: pool.release(self._name, job.slot))

    def close(self) -> None:
        with self._pool._condition:
            self._closed = True
            self._pool._queue.close(self._name, self._generation, self._pool._ranks[0])
            self._pool._condition.notify_all()
        self._pool._wake()

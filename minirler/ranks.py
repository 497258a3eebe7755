"""The processes of a job: who is who, what they tell each other, and how they end together.

    torchrun --nproc-per-node 8 -m minirler.train CONFIG

torchrun starts the processes and says by environment variables which rank each one is. Without it
there is one process, rank 0 of 1, which shares with nobody and talks to nobody.

A rank that fails tells the others why and all of them end; one that is killed, or gets stuck so
that its threads stand still, is missed by its silence. Not here: shards of weights (`dist`).
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
BEAT_S = 1.0  # between two looks at the others
SILENT_S = 30.0  # without a sign of life a rank counts as dead
TOLD_S = 5.0  # that a failed rank waits for the others to read why
# A rank may wait for the slowest rollout of another one; dead ranks are found by their silence.
COLLECTIVE_S = 4 * 3600.0


class Ranks:
    """This process, `rank` of `size`, computing on `device`.

    Every method that exchanges something has to be called by all ranks, in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu"):
        self.rank, self.size, self.device = rank, size, device
        self._watch: Watch | None = None

    @property
    def is_first(self) -> bool:
        """Is this the rank that writes files and speaks?"""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This rank's part of a list that all ranks have."""
        return list(items[self.rank :: self.size])

    def unshare(self, mine: list[T]) -> list[T]:
        """The list whose `share` every rank gives: one item for each, in the list's order."""
        parts = self.gather(mine)
        whole: list = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            whole[rank :: self.size] = part
        return whole

    def gather(self, value: T) -> list[T]:
        """What every rank gives, by rank."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def total(self, numbers: dict[str, float]) -> dict[str, float]:
        """Sums over the ranks, by name; the same bits on all of them."""
        parts = self.gather(numbers)
        return {name: sum(part[name] for part in parts) for name in numbers}

    def first_then_others(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, then on the others, which find the files that it made."""
        if not self.is_first:
            self.barrier()
        result = action()
        if self.is_first:
            self.barrier()
        return result

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)

    def limit(self, count: int) -> int:
        """This rank's part of a limit that holds for the whole job; at least 1."""
        return max(1, count // self.size)

    def leave(self) -> None:
        """End well, together with the others."""
        if self._watch:
            self._watch.stop()
            self.barrier()
            dist.destroy_process_group()

    def fail(self, error: BaseException) -> None:
        """End badly: tell every rank why and exit. With one process this does nothing."""
        if self._watch:
            self._watch.tell(f"rank {self.rank}: {type(error).__name__}: {error}")
            leave_at_once()


ALONE = Ranks()


def join() -> Ranks:
    """The rank that the environment says this process is; waits until all have come."""
    rank, size, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    has_gpu = torch.cuda.is_available()
    if size == 1:
        return Ranks(device="cuda" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(local)
    # Objects travel by gloo also where tensors travel by nccl: they lie in the host's memory.
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_S))
    ranks = Ranks(rank, size, f"cuda:{local}" if has_gpu else "cpu")
    ranks._watch = Watch(rank, size)
    ranks.barrier()  # all have given their first sign of life
    ranks._watch.start()
    return ranks


def leave_at_once() -> None:
    """Exit with status 1, past threads that wait for ranks which will not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class Watch:
    """Signs of life and the reason of a failure, in the key-value store of the job.

    It has a connection of its own: the one of torch.distributed may be waiting for something.
    """

    def __init__(self, rank: int, size: int):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=SILENT_S)
        self._store = dist.TCPStore(host, port, is_master=False, timeout=patience)
        self._rank, self._size, self._beats = rank, size, 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # last sign of a rank, and when it came
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._beat()

    def start(self) -> None:
        """Begin to watch the others."""
        self._thread.start()

    def stop(self) -> None:
        """No longer watch; the others should stop too, before this process ends."""
        self._ended.set()
        self._thread.join()

    def tell(self, text: str) -> None:
        """Let all ranks know why this one ends (the first to fail is right), and wait for them."""
        self._ended.set()
        try:
            first = self._store.compare_set("failure", "", text).decode()
            if first != text:  # this rank failed because that one did
                print(f"error: {first}", file=sys.stderr)
            self._store.add("told", 1)
            end = time.monotonic() + TOLD_S
            while self._store.add("told", 0) < self._size and time.monotonic() < end:
                time.sleep(0.05)
        except RuntimeError as error:  # the store is gone, and so is the job
            print(f"error: nobody could be told: {error}", file=sys.stderr)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                why = self._look()
            except RuntimeError as error:
                why = f"the first rank's machine does not answer ({error})"
            if why and not self._ended.is_set():
                print(f"error: {why}", file=sys.stderr)
                leave_at_once()

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", str(self._beats))

    def _look(self) -> str:
        """Why the job has to end; empty if it need not."""
        self._beat()
        if self._store.check(["failure"]):
            self._store.add("told", 1)
            return self._store.get("failure").decode()
        others = [rank for rank in range(self._size) if rank != self._rank]
        beats = self._store.multi_get([f"beat/{rank}" for rank in others])
        now = time.monotonic()
        for rank, beat in zip(others, beats, strict=True):
            if self._heard.get(rank, (b"", 0.0))[0] != beat:
                self._heard[rank] = beat, now
            elif now - self._heard[rank][1] > SILENT_S:
                return (
                    f"rank {rank} has given no sign of life for {SILENT_S:.0f} s: it was killed or"
                    f" is stuck (seen from rank {self._rank} on {socket.gethostname()})"
                )
        return ""

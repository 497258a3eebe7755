"""What a run tells: metrics.jsonl, TensorBoard if installed, one console line a step, bars, timers.

Nothing is held back: every line is on disk or on the screen when its call returns. Not here: which
numbers a step has (`train`), and alarms about them (`monitor`).
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from .config import ConfigError

TIMED = ("sampling", "tools", "judge", "update")  # where a step's time goes, in the console line


class MetricsLog:
    """Appends rows to RUN/metrics.jsonl, as JSON that strict readers accept.

    A row cut short by a kill is removed on opening; with `offset` (bytes, from a checkpoint) so is
    everything after it, so that a resumed run repeats no row. `rows` has all that the file has.
    Raises ConfigError for a folder that cannot be written, ValueError for a file shorter than
    `offset`, or a line in it that is no JSON.
    """

    def __init__(self, run_dir: Path | str, offset: int | None = None):
        self.path = Path(run_dir) / "metrics.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab+")
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror}; "
                              "set run.dir to a folder that can be written") from None
        self._cut(offset)
        self.rows = read_metrics(self.path)
        self._board = tensorboard_writer(Path(run_dir) / "tensorboard")

    def write(self, row: dict) -> None:
        """Append one row and flush.

        Values: numbers, numpy scalars, 0-d tensors, text, None, lists and dicts of these. NaN and
        infinities become null; the row says how many as `nonfinite`.
        """
        clean, nonfinite = strict(row)
        clean["nonfinite"] = nonfinite
        line = json.dumps(clean, allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode("utf-8", "replace") + b"\n")
        self._file.flush()
        self.rows.append(clean)
        if self._board:
            self._board.add(clean)

    def offset(self) -> int:
        """Bytes written so far: what a checkpoint keeps."""
        return self._file.seek(0, 2)

    def close(self) -> None:
        """Close the file; a closed log takes no more rows."""
        self._file.close()
        if self._board:
            self._board.close()

    def _cut(self, offset: int | None) -> None:
        self._file.seek(0)
        content = self._file.read()
        if offset is not None and len(content) < offset:
            raise ValueError(f"{self.path} has {len(content)} bytes, its checkpoint {offset}: "
                             "restore the file, or start a new run.dir")
        self._file.truncate(content.rfind(b"\n", 0, offset) + 1)


def read_metrics(path: Path | str) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is skipped.

    Raises ValueError with the file and the line for any other unreadable one.
    """
    rows, lines = [], Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return rows


def strict(value) -> tuple[object, int]:
    """`value` as strict JSON has it, and how many of its numbers were not finite (now None)."""
    if isinstance(value, dict):
        pairs = {str(key): strict(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(n for _, n in pairs.values())
    if isinstance(value, list | tuple):
        items = [strict(item) for item in value]
        return [item for item, _ in items], sum(n for _, n in items)
    if hasattr(value, "item"):  # numpy scalars and 0-d tensors, without importing either
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None, 1
    return value, 0


class Timers:
    """Seconds by name: `with timers("sampling"): ...`.

    Blocks of one name may overlap (concurrent tasks of one event loop): the time during which at
    least one is open counts once.
    """

    def __init__(self, clock=time.perf_counter):
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._open: dict[str, int] = {}
        self._since: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        if not self._open.get(name):
            self._since[name] = self._clock()
        self._open[name] = self._open.get(name, 0) + 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                spent = self._clock() - self._since[name]
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def reset(self) -> dict[str, float]:
        """The seconds so far, by name; counting starts anew."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class Bar:
    """A progress bar on a terminal; nothing elsewhere, where the console lines tell enough.

    Called with the number done and the number of tokens so far, as `rollout` reports them.
    """

    def __init__(self, total: int, label: str, unit: str = "rollout"):
        quiet = not (sys.stderr.isatty() and is_speaker())
        self._bar = tqdm(total=total, desc=label, unit=unit, leave=False, disable=quiet)

    def __call__(self, done: int, tokens: int) -> None:
        """Move the bar."""
        self._bar.set_postfix(tokens=tokens, refresh=False)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exc) -> None:
        self._bar.close()


def is_speaker() -> bool:
    """Whether this process is the one of a job (of `torchrun`) that prints."""
    return int(os.environ.get("RANK", 0)) == 0


def say(text: str) -> None:
    """Print at once, above a bar if there is one; of several ranks only the first one does."""
    if not is_speaker():
        return
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def mean(values: list[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None


def step_line(step: int, steps: int, row: dict, eta_s: float | None = None) -> str:
    """The console line of a step, from a metrics row; what the row lacks is left out.

    Reads `reward`, `reward/NAME`, `held_out`, `entropy`, `mismatch_kl`, `tokens_per_s`, `seconds`
    (of the step) and `seconds/NAME` (as `Timers` has them, for the names in TIMED).
    """
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    if row.get("reward") is not None:
        shares = [f"{key[7:]} {v:.2f}" for key, v in row.items()
                  if key.startswith("reward/") and v is not None]
        parts.append(f"reward {row['reward']:.3f}" + (f" ({', '.join(shares)})" if shares else ""))
    for key, form in (("held_out", "held-out {:.3f}"), ("entropy", "entropy {:.3f}"),
                      ("mismatch_kl", "mismatch KL {:.1e}"), ("tokens_per_s", "{:,.0f} tokens/s")):
        if row.get(key) is not None:
            parts.append(form.format(row[key]))
    if row.get("seconds"):
        spent = {name: row.get(f"seconds/{name}", 0.0) / row["seconds"] for name in TIMED}
        parts.append(" ".join(f"{name} {share:.0%}" for name, share in spent.items()))
        parts.append(f"{row['seconds']:.1f} s")
    if eta_s is not None:
        parts.append(f"ETA {duration(eta_s)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`75.2` as "1m15s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes
            else f"{rest}s")


def before_after(before: dict, after: dict, names: dict[str, str] | None = None) -> str:
    """A table `before -> after` of two evaluations; `names` selects, orders and labels the rows."""
    names = names or {key: key for key in before if key in after}
    width = max(map(len, names.values()), default=0)
    lines = [f"{'':{width}}  {'before':>8}    {'after':>8}    {'change':>8}"]
    for key, label in names.items():
        old, new = before.get(key), after.get(key)
        change = f"{new - old:+8.3f}" if None not in (old, new) else f"{'-':>8}"
        old, new = (f"{'-':>8}" if x is None else f"{x:8.3f}" for x in (old, new))
        lines.append(f"{label:{width}}  {old} -> {new}    {change}")
    return "\n".join(lines)


class Board:
    """TensorBoard event files, written with TensorBoard's own writer (no torch needed)."""

    def __init__(self, folder: Path):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))

    def add(self, row: dict) -> None:
        """Every number of the row as a scalar of its `step`."""
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in row.items()
                  if isinstance(value, int | float) and key != "step"]
        summary = self._summary(value=values)
        event = self._event(wall_time=time.time(), step=int(row.get("step") or 0), summary=summary)
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def tensorboard_writer(folder: Path) -> Board | None:
    """A Board, or None where the `tensorboard` extra is not installed."""
    try:
        return Board(folder)
    except ModuleNotFoundError:
        return None

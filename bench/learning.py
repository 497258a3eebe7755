"""What several finished runs learned: mean and spread by step, as a Markdown table and a PNG.

    for s in 0 1 2; do python -m minirler.train configs/almanac.toml run.seed=$s \\
        run.dir=runs/evolve-$s; done
    for s in 0 1 2; do python -m minirler.train configs/almanac.toml run.seed=$s \\
        run.dir=runs/fixed-$s rubrics.evolve=false; done
    python bench/learning.py OUT.png evolving=runs/evolve-0,runs/evolve-1,runs/evolve-2 \\
        fixed=runs/fixed-0,runs/fixed-1,runs/fixed-2

Reads run folders only; ends in one JSON line.
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib

from minirler.log import read_metrics

PANELS = (
    ("held_out/gold", "held-out gold coverage"),
    ("reward", "training reward"),
    ("sampled_tokens", "tokens sampled a rollout"),
)


def series(folders: list[Path], key: str) -> dict[int, list[float]]:
    """Values of `key` by step, over the runs."""
    found: dict[int, list[float]] = {}
    for folder in folders:
        for row in read_metrics(folder / "metrics.jsonl"):
            if row.get(key) is not None:
                found.setdefault(row["step"], []).append(row[key])
    return found


def spread(values: list[float]) -> float:
    """Population standard deviation; 0 of one value."""
    return statistics.pstdev(values)


def rubric_life(folders: list[Path]) -> dict[str, float]:
    """Births and retirements of evolving criteria a run."""
    counts = {"born, positive": 0, "born, negative": 0, "retired, flat": 0, "retired, cap": 0}
    for folder in folders:
        for line in open(folder / "rubrics.jsonl", encoding="utf-8"):
            event = json.loads(line)
            if event["event"] == "born" and event["kind"] == "evolving":
                counts[f"born, {'positive' if event['weight'] > 0 else 'negative'}"] += 1
            elif event["event"] == "retired":
                counts[f"retired, {event['why']}"] += 1
    return {name: count / len(folders) for name, count in counts.items()}


def table(runs: dict[str, list[Path]]) -> str:
    """Held-out gold coverage, reward and length at the evaluated steps: mean +- spread."""
    lines = ["| runs | step | gold coverage | reward | tokens a rollout |", "|---|---|---|---|---|"]
    for name, folders in runs.items():
        gold, *others = (series(folders, key) for key, _ in PANELS)
        for step, values in sorted(gold.items()):
            cells = [f"{statistics.mean(values):.3f} ± {spread(values):.3f}"]
            for other, form in zip(others, (".3f", ".0f"), strict=True):
                some = other.get(step)
                cells.append(
                    f"{statistics.mean(some):{form}} ± {spread(some):{form}}" if some else ""
                )
            lines.append(f"| {name} | {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: dict[str, list[Path]], out: Path) -> None:
    """One panel a quantity: the mean over the runs, with a band of one standard deviation."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(12, 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        for name, folders in runs.items():
            found = sorted(series(folders, key).items())
            steps = [step for step, _ in found]
            means = [statistics.mean(values) for _, values in found]
            low = [m - spread(v) for m, (_, v) in zip(means, found, strict=True)]
            high = [m + spread(v) for m, (_, v) in zip(means, found, strict=True)]
            axis.plot(steps, means, label=f"{name} ({len(folders)} seeds)")
            axis.fill_between(steps, low, high, alpha=0.2)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Command line: OUT.png NAME=FOLDER,FOLDER ..."""
    out, *groups = sys.argv[1:]
    runs = {}
    for group in groups:
        name, _, folders = group.partition("=")
        runs[name] = [Path(folder) for folder in folders.split(",")]
    print(table(runs))
    draw(runs, Path(out))
    summary = {"plot": out}
    for name, folders in runs.items():
        gold = series(folders, "held_out/gold")
        summary[name] = {
            "gold_first": statistics.mean(gold[min(gold)]),
            "gold_last": statistics.mean(gold[max(gold)]),
            "rubrics a run": rubric_life(folders),
        }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

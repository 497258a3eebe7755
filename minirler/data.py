"""Prompts from a JSONL file, and the order in which a run visits them.

One object a line: `question` (text) or `messages` (a chat), and optionally `id`, `kind`, `rubrics`
(objects with a `description`) or `ground_truth` (as in RLER's data: an object with `rubrics`, or
its JSON text; a plain answer is kept as metadata).

Not here: the almanac's questions (`world`), and mixtures of data sets.
"""

import json
import random
from pathlib import Path

from .config import ConfigError
from .records import Prompt

READ = ("id", "kind", "question", "messages", "rubrics")  # the rest of a row is metadata
ROLES = ("system", "user", "assistant")


def read_prompts(path: Path | str, system: str = "") -> list[Prompt]:
    """The prompts of a JSONL file, in its order; blank lines are skipped.

    `system` becomes the system message of those without one. Without an id it is `row-LINE`.
    Raises ConfigError, which names the file, the line and what is wrong.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no data file {path}; set data.source to a JSONL of prompts") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    prompts, lines = [], {}
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would split at U+2028 too
        if not line.strip():
            continue
        try:
            prompt = read_row(json.loads(line), f"row-{number}", system)
            if prompt.id in lines:
                raise ValueError(f"id {prompt.id!r} is also that of line {lines[prompt.id]}")
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: write one JSON object with a `question` a line")
    return prompts


def read_row(row, default_id: str, system: str) -> Prompt:
    """One row as a Prompt; ValueError says what is wrong with it."""
    row = joined(row)
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    if ("messages" in row) == ("question" in row):
        raise ValueError("needs a `question` or `messages`, one of them")
    messages = row.get("messages") or [{"role": "user", "content": row.get("question")}]
    check_messages(messages)
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    truth = row.get("ground_truth")
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        truth = joined(json.loads(truth))
    nested = truth.get("rubrics") if isinstance(truth, dict) else None
    rubrics = row.get("rubrics") or nested or []
    if not isinstance(rubrics, list) or not all(
        isinstance(r, dict) and is_text(r.get("description")) for r in rubrics
    ):
        raise ValueError("`rubrics` must be a list of objects with a `description`")
    name, kind = row.get("id", default_id), row.get("kind", "long_form")
    if not is_text(name) and not isinstance(name, int) or not is_text(kind):
        raise ValueError("`id` and `kind` must be text")
    rest = {k: v for k, v in row.items() if k not in READ}
    question = next(m["content"] for m in reversed(messages) if m["role"] == "user")
    return Prompt(str(name), question, tuple(messages), tuple(rubrics), kind, rest)


def check_messages(messages) -> None:
    """ValueError unless `messages` is a chat that ends in a question."""
    if not isinstance(messages, list):
        raise ValueError("`messages` must be a list")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"message {i} needs a role: one of {', '.join(ROLES)}")
        if not is_text(message.get("content")):
            raise ValueError(f"the content of message {i} must be text, and not empty")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message must be the user's")


def is_text(value) -> bool:
    """Whether `value` is a string with something in it."""
    return isinstance(value, str) and bool(value.strip())


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs, replace lone surrogates by U+FFFD: the result encodes as UTF-8."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def joined(value):
    """`value` (of JSON) with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [joined(item) for item in value]
    if isinstance(value, dict):
        return {joined(key): joined(item) for key, item in value.items()}
    return value


def read_system_prompt(name: str) -> str:
    """A system prompt: `minirler/prompts/NAME.txt`, or any path that ends in .txt."""
    shipped = Path(__file__).parent / "prompts" / f"{name}.txt"
    path = Path(name) if name.endswith(".txt") else shipped
    if not path.is_file():
        raise ConfigError(f"data.system_prompt = {name!r}: there is no file {path}")
    return path.read_text(encoding="utf-8").strip()


class PromptOrder:
    """The endless order of visits: each epoch is a shuffle of range(num), made of (seed, epoch).

    No step crosses the end of an epoch, since a prompt must not be in a step twice: the last few of
    an epoch, fewer than a step takes, are left out of it.
    """

    def __init__(self, num: int, seed: int):
        if num < 1:
            raise ValueError(f"an order needs at least one prompt, got {num}")
        self.num, self.seed = num, seed
        self.load({"epoch": 0, "index": 0})

    def next(self, count: int) -> list[int]:
        """The next `count` indices, at most `num`: all of one epoch, so all distinct."""
        if count > self.num:
            raise ValueError(f"cannot take {count} distinct prompts of {self.num}")
        if self.index + count > self.num:
            self.load({"epoch": self.epoch + 1, "index": 0})
        self.index += count
        return self.order[self.index - count : self.index]

    def state(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {"epoch": self.epoch, "index": self.index}

    def load(self, state: dict[str, int]) -> None:
        """Go to a position that `state` gave."""
        self.epoch, self.index = state["epoch"], state["index"]
        self.order = list(range(self.num))
        random.Random(f"{self.seed} {self.epoch}").shuffle(self.order)

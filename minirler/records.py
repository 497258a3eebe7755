"""The few dataclasses that cross module borders, and the protocol of a language model.

Not here: anything with behaviour, and anything that needs torch. `Rubric` and `RubricBuffer` live
in `rubrics`, because they have rules of their own.

Units: seconds, tokens, characters. A rollout is an append-only list of segments: text is derived
from its ids and never the other way round.
"""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Prompt:
    """One question. `messages` are what the policy reads; `rubrics` are data-set rubrics (raw
    dicts)."""

    id: str
    question: str
    messages: tuple[dict, ...]
    rubrics: tuple[dict, ...] = ()
    kind: str = "long_form"
    metadata: dict = field(default_factory=dict)


@dataclass
class Segment:
    """A run of tokens of one origin: prompt or tool output (`sampled` False) or the policy (True).

    `logps` has one float32-valued entry a token (0.0 for forced ones); `step` is the policy step
    that sampled it.
    """

    ids: list[int]
    logps: list[float]
    sampled: bool
    step: int


@dataclass(frozen=True)
class Snippet:
    """A citable passage: `id` is what the policy cites, `doc_id` the document that it comes
    from."""

    id: str
    title: str
    text: str
    doc_id: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A parsed `<call_tool name="..." key="value">content</call_tool>`."""

    name: str
    arguments: dict[str, str]
    content: str


@dataclass(frozen=True)
class ToolResult:
    """What a call ended in. `status`: "ok", "error", "timeout" or "limit" (too many calls).

    Only "ok" results carry snippets: an error is never citable.
    """

    status: str
    text: str = ""
    snippets: tuple[Snippet, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Citation:
    """A cited span of an answer: `ids` as written, `text` the claim between the tags."""

    ids: tuple[str, ...]
    text: str


@dataclass
class Rollout:
    """One trajectory of one prompt.

    `stop_reason` is that of the last turn: "stop" or "length". `answer` is None where there is
    none. `text` is what the policy wrote (sampled tokens only, tool output left out).
    """

    prompt_id: str
    sample: int
    segments: list[Segment] = field(default_factory=list)
    calls: list[tuple[ToolCall, ToolResult]] = field(default_factory=list)
    stop_reason: str = "length"
    answer: str | None = None
    citations: list[Citation] = field(default_factory=list)
    text: str = ""

    def snippets(self) -> dict[str, Snippet]:
        """Every citable passage that this rollout has seen, by id."""
        return {s.id: s for _, result in self.calls for s in result.snippets}

    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(s.ids) for s in self.segments if s.sampled)


@dataclass
class Group:
    """A prompt, its G rollouts and how they were judged.

    `criteria` are the C rubrics used; `verdicts` is [G][C] with None for missing; `components`
    maps a reward component to its G values (None: missing); `rewards` are the G totals (None:
    unscored). `changes` is what judging it changed in the rubric buffer: (method, arguments after
    the prompt's id), in order.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    criteria: list = field(default_factory=list)
    verdicts: list[list[float | None]] = field(default_factory=list)
    components: dict[str, list[float | None]] = field(default_factory=dict)
    rewards: list[float | None] = field(default_factory=list)
    changes: list[tuple[str, tuple]] = field(default_factory=list)


@dataclass(frozen=True)
class LMRequest:
    """What is asked of a language model: hosted models read `messages`, the offline one `task` and
    `fields`."""

    task: str
    fields: dict
    messages: tuple[dict, ...]
    max_tokens: int = 4096
    temperature: float = 0.0
    salt: str = ""  # tells equal requests apart, such as the tries of one: each has its own reply


@dataclass(frozen=True)
class LMReply:
    """A reply; `text` is None where none arrived (`error` says why). `finish_reason`: "stop",
    "length", "error"."""

    text: str | None
    finish_reason: str = "stop"
    error: str = ""


class LM(Protocol):
    """A language model. `complete` raises ConfigError where it cannot work as configured, and on
    cancellation; every other failure is a reply without text."""

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request."""
        ...

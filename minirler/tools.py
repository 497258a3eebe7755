"""What the policy writes and reads around tools: the grammar, and the executor of calls.

    <think>...</think>
    <call_tool name="local_search">Belomo chronicle</call_tool>
    <tool_output>
    <snippet id=kdwxrtzm-0>
    TITLE
    TEXT
    </snippet>
    </tool_output>
    <answer><cite id="kdwxrtzm-0">Its ruler is Dasimo.</cite> Its river is Talemo.</answer>

Parsers take any text, never raise, and skip tool output (which `render_result` keeps from forging
tags). Not here: tokens, masks and stop conditions (`rollout`), a call's worth (`reward`).
"""

import asyncio
import inspect
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from .config import ConfigError
from .records import Citation, Snippet, ToolCall, ToolResult
from .search import Hit, LocalSearch, utf8

ID_ALPHABET = "bcdfghjklmnpqrstvwxz"  # 20 letters, no vowels: an id never spells a word
MAX_MESSAGE = 300  # characters of an error that the policy is shown
BLOCK = re.compile(r"<(?:(think|answer|tool_output)>|call_tool(?=[\s>])|/(?:think|tool_output)>)")
ATTRIBUTE = re.compile(r'\s+([A-Za-z_][\w-]*)="([^"]*)"')
TAG_END = re.compile(r"\s*>")
STRING_OR_CLOSE = re.compile(r'"(?:[^"\\]+|\\.?)*(?:"|\Z)|</call_tool>', re.DOTALL)
CLOSE = "</call_tool>"
CITE = re.compile(r"<cite((?:\s[^<>]*)?)>|</cite\s*>")
CITE_IDS = re.compile(r"""\sids?\s*=\s*(?:"([^"]*)"|'([^']*)'|(.*?)(?=\s\w+\s*=|$))""", re.DOTALL)
NAMES = "think|call_tool|tool_output|snippet|answer|cite"
TAG = re.compile(rf"</?(?:{NAMES})(?:\s[^<>]*)?>")
FORGEABLE = re.compile(rf"<(?=\s*/?\s*(?:{NAMES})(?![A-Za-z0-9_]))", re.IGNORECASE)


def parse_call(text: str) -> ToolCall | None:
    """The first complete call in the text generated since the last observation, else None.

    Calls inside thinking, answers and tool output are not calls, nor is one without `name`, with a
    malformed attribute, or without an end. A `</call_tool>` inside a quoted attribute, or inside a
    string of content that starts with "{" (JSON), does not end the call.
    """
    call = None
    for kind, value in _blocks(text):
        if kind in ("tool_output", "start"):
            call = None  # what came before has been answered, or was thinking
        elif kind == "call" and call is None:
            call = value
    return call


def parse_answer(text: str) -> str | None:
    """The first complete answer after the last reasoning; None where absent, open or empty."""
    answer = None
    for kind, value in _blocks(text):
        if kind in ("think", "start"):
            answer = None
        elif kind == "answer" and answer is None:
            answer = value
    return answer or None


def render_call(call: ToolCall) -> str:
    """The text of a call, such that `parse_call` reads the same call back.

    ValueError for one that the grammar cannot write: a quote in an argument, content with space
    around it or with an end tag in it, an argument called "name".
    """
    attributes = "".join(f' {k}="{v}"' for k, v in {"name": call.name, **call.arguments}.items())
    text = f"<call_tool{attributes}>{call.content}</call_tool>"
    if parse_call(text) != call:
        raise ValueError(f"the grammar has no way to write {call!r}")
    return text


def render_result(result: ToolResult) -> str:
    """The forced text that follows a call: snippets, or the message where there are none."""
    lines = [_defuse(result.text)] if not result.snippets else []
    for s in result.snippets:
        title = _defuse(" ".join(s.title.split()))
        lines += [f"<snippet id={s.id}>", title, _defuse(s.text.strip()), "</snippet>"]
    return "\n".join(["\n<tool_output>", *lines, "</tool_output>\n"])


def limit_result(max_tool_calls: int) -> ToolResult:
    """What a call beyond the limit gets."""
    return ToolResult("limit", f"No calls are left: the limit is {max_tool_calls}. Answer now.")


def parse_citations(answer: str) -> list[Citation]:
    """The cited spans of an answer, in order; spans without an id are left out.

    Ids (attribute `id` or `ids`, quoted or not) are separated by commas or spaces. Spans do not
    nest: one ends at its end tag, at the next `<cite>`, or at the end of the answer.
    """
    citations, ids, start = [], (), 0
    for tag in [*CITE.finditer(answer), None]:
        end = tag.start() if tag else len(answer)
        if ids:
            citations.append(Citation(ids, strip_tags(answer[start:end]).strip()))
        ids = _cited_ids(tag[1]) if tag and tag[1] else ()
        start = tag.end() if tag else end
    return citations


def strip_tags(answer: str) -> str:
    """The answer as plain text: the grammar's tags are taken out, what they enclose stays."""
    return TAG.sub("", answer)


def call_id(seed: int, prompt_id: str, sample: int, number: int, chars: int = 8) -> str:
    """The call part of snippet ids: a hash of where the call stands, in letters without vowels."""
    place = f"{seed} {sample} {number} {prompt_id}".encode("utf-8", "surrogatepass")
    value = int.from_bytes(blake2b(place).digest(), "big")  # 512 bits: enough for 118 letters
    return "".join(ID_ALPHABET[value // 20**i % 20] for i in range(chars))


def _blocks(text: str) -> Iterator[tuple[str, Any]]:
    """Top-level blocks in order: ("think", None), ("tool_output", None), ("answer", str) and
    ("call", ToolCall). In a block nothing else is a tag. An open one hides the rest, but an open or
    malformed call is no block. A lone end tag closes what began before the text: ("start", None).
    """
    position = 0
    while match := BLOCK.search(text, position):
        position = match.end()
        kind = match[1]
        if kind:
            end = text.find(f"</{kind}>", position)
            if end >= 0 or kind != "answer":
                yield kind, text[position:end].strip() if kind == "answer" else None
            if end < 0:
                return
            position = end + len(f"</{kind}>")
        elif match[0].startswith("</"):
            yield "start", None
        elif found := _call_at(text, position):
            call, position = found
            yield "call", call


def _call_at(text: str, position: int) -> tuple[ToolCall, int] | None:
    """The call whose attributes start at `position`, and where it ends."""
    arguments: dict[str, str] = {}
    while match := ATTRIBUTE.match(text, position):
        if match[1] in arguments:
            return None
        arguments[match[1]] = match[2]
        position = match.end()
    tag_end = TAG_END.match(text, position)
    name = arguments.pop("name", "")
    if not tag_end or not name.strip():
        return None
    end = _content_end(text, tag_end.end())
    if end < 0:
        return None
    return ToolCall(name, arguments, text[tag_end.end():end].strip()), end + len(CLOSE)


def _content_end(text: str, start: int) -> int:
    """Where the end tag of content that starts at `start` is, or -1."""
    end = text.find(CLOSE, start)
    if end < 0 or not text[start:end].lstrip().startswith("{"):
        return end
    for match in STRING_OR_CLOSE.finditer(text, start):
        if match[0] == CLOSE:
            return match.start()
    return -1


def _cited_ids(attributes: str) -> tuple[str, ...]:
    match = CITE_IDS.search(attributes)
    written = next((g for g in match.groups() if g is not None), "") if match else ""
    return tuple(i for i in re.split(r"[\s,;\"']+", written) if i)


def _defuse(text: str) -> str:
    """Untrusted text without our tags (their "<" is written "&lt;") and without lone surrogates."""
    return FORGEABLE.sub("&lt;", utf8(text))


@dataclass(frozen=True)
class Tool:
    """`run(call)` returns hits, text or None; it is a coroutine function, or a plain one (threads).

    `idempotent` tools may be asked again after a timeout of their own.
    """

    run: Callable[[ToolCall], Any]
    idempotent: bool = False


class Executor:
    """Runs calls: concurrently, each within a deadline, each ending in a typed result.

    At most `max_concurrent` calls of one tool are in flight, whoever asks: make one executor a
    process. A call has `deadline_s` seconds from the moment it gets its slot, retries included.
    Connection errors are tried again `retries` times. Bad settings are a ConfigError.
    A plain function cannot be cancelled: after its deadline its thread runs on, unheard.
    """

    def __init__(self, tools: dict[str, Tool | Callable[[ToolCall], Any]], *,
                 max_concurrent: int = 64, deadline_s: float = 180.0, retries: int = 3,
                 id_chars: int = 8, seed: int = 0, backoff_s: float = 0.5):
        for key, value, least in (("max_concurrent", max_concurrent, 1), ("retries", retries, 0),
                                  ("id_chars", id_chars, 1)):
            if value < least:
                raise ConfigError(f"tools.{key} must be at least {least}, got {value}")
        if not deadline_s > 0:
            raise ConfigError(f"tools.deadline_s must be above 0, got {deadline_s}")
        self.tools = {name: t if isinstance(t, Tool) else Tool(t) for name, t in tools.items()}
        self.max_concurrent, self.deadline_s, self.retries = max_concurrent, deadline_s, retries
        self.id_chars, self.seed, self.backoff_s = id_chars, seed, backoff_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: dict[str, asyncio.Semaphore] = {}
        # Not asyncio.to_thread: its pool has CPUs + 4 threads, and a few hung tools would fill it.
        self._threads = {name: ThreadPoolExecutor(max_concurrent, name) for name in self.tools}

    async def run(self, call: ToolCall, prompt_id: str, sample: int, number: int) -> ToolResult:
        """The result of call `number` of a rollout; never raises, but for cancellation."""
        start = time.monotonic()
        result = await self._within_deadline(call)
        prefix = call_id(self.seed, prompt_id, sample, number, self.id_chars)
        snippets = tuple(replace(s, id=f"{prefix}-{i}") for i, s in enumerate(result.snippets))
        return replace(result, snippets=snippets, seconds=time.monotonic() - start)

    async def _within_deadline(self, call: ToolCall) -> ToolResult:
        if call.name not in self.tools:
            known = ", ".join(sorted(self.tools))
            return ToolResult("error", _message(f"No tool is named {call.name!r}; use: {known}."))
        async with self._slot(call.name):
            try:
                async with asyncio.timeout(self.deadline_s):
                    return _result(await self._with_retries(call))
            except TimeoutError:
                return ToolResult("timeout", f"{_message(call.name)} did not answer in time.")
            except Exception as error:  # the one place where a tool's exception becomes data
                text = f"{call.name} failed: {type(error).__name__}: {error}"
                return ToolResult("error", _message(text))

    async def _with_retries(self, call: ToolCall) -> Any:
        tool = self.tools[call.name]
        for attempt in range(self.retries + 1):
            try:
                return await self._once(tool, call)
            except OSError as error:  # ConnectionError and TimeoutError are OSErrors
                unsafe = isinstance(error, TimeoutError) and not tool.idempotent
                if unsafe or attempt == self.retries:
                    raise
            await asyncio.sleep(self.backoff_s * 2**attempt * random.uniform(0.5, 1.0))

    async def _once(self, tool: Tool, call: ToolCall) -> Any:
        if inspect.iscoroutinefunction(tool.run):
            return await tool.run(call)
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(self._threads[call.name], tool.run, call)
        return await value if isinstance(value, Awaitable) else value

    def _slot(self, name: str) -> asyncio.Semaphore:
        """The tool's limiter. A semaphore belongs to one event loop; a new loop gets new ones."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._slots = loop, {}
        return self._slots.setdefault(name, asyncio.Semaphore(self.max_concurrent))


def _result(value: Any) -> ToolResult:
    """What a tool returned, as a result whose snippets have no ids yet."""
    if value is None or value in ("", [], ()):
        return ToolResult("ok", "No results.")
    if isinstance(value, list | tuple) and all(isinstance(hit, Hit) for hit in value):
        return ToolResult("ok", snippets=tuple(
            Snippet("", utf8(hit.title), utf8(hit.text), utf8(hit.doc_id)) for hit in value))
    return ToolResult("ok", utf8(str(value)))


def _message(text: str) -> str:
    text = " ".join(utf8(text).split())
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def local_tools(search: LocalSearch, limit: int) -> dict[str, Tool]:
    """The tools of a local corpus: `local_search` finds the best `limit` documents."""
    def local_search(call: ToolCall) -> list[Hit]:
        if not call.content:
            raise ValueError("the query is empty")
        return search.search(call.content, limit)

    return {"local_search": Tool(local_search, idempotent=True)}

"""Language models behind one call: prompts from files, strict JSON reading, an OpenAI client.

A request carries a task, its raw fields and the messages made of them. Hosted models read messages,
the offline model (`offline`) reads task and fields. Text that we did not write (questions, answers,
documents, criteria) is escaped and fenced, so that it cannot pose as part of the prompt.

Not here: what is asked (prompts/*.txt), and what a reply means (`judge`, `evolve`).
"""

import copy
import functools
import json
import os
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from .config import ConfigError
from .data import joined, replace_surrogates
from .endpoint import Endpoint, EndpointError
from .recording import Cache, Reply
from .records import LMReply, LMRequest

OPENAI_URL = "https://api.openai.com/v1"
PROMPTS = Path(__file__).parent / "prompts"
_FIELD = re.compile(r"\{([a-z_]+)\}")  # spares JSON in a template, where a quote follows the brace
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)
_MARK = re.compile(r"\{|</?think>")
_TOKEN = re.compile(r'["{}]|\\.|,(?=\s*[}\]])', re.DOTALL)


def make_request(
    task: str,
    fields: Mapping,
    max_tokens: int = 4096,
    temperature: float = 0.0,
    prompts_dir: Path | str | None = None,
) -> LMRequest:
    """A request for `task`: its raw fields beside the messages rendered from prompts/<task>.txt."""
    messages = render(task, fields, prompts_dir)
    return LMRequest(task, dict(fields), messages, max_tokens, temperature)


def render(task: str, fields: Mapping, prompts_dir: Path | str | None = None) -> tuple[dict, ...]:
    """One user message: the template `<task>.txt` with each `{field}` replaced.

    Numbers go in as they are. Any other value is untrusted: lists and dicts become JSON (where a
    string cannot pose as the next item), then `& < >` are escaped and a fence is put around.
    Errors: ConfigError where the file is missing, ValueError where fields and template disagree.
    """
    path = Path(prompts_dir or PROMPTS) / f"{task}.txt"
    template = _template(path)
    wanted = set(_FIELD.findall(template))
    if wanted != set(fields):
        name = min(wanted.symmetric_difference(fields))
        why = "was not given" if name in wanted else "is missing in the file"
        raise ValueError(f"{path}: field {{{name}}} {why}; this prompt takes {sorted(fields)}")
    # One pass over the template, so a value that contains "{answer}" is not filled in again.
    text = _FIELD.sub(lambda match: _show(match[1], fields[match[1]]), template)
    return ({"role": "user", "content": text},)


@functools.cache
def _template(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path}: no such prompt file; install minirler anew")
    return path.read_text(encoding="utf-8").strip()


def _show(name: str, value) -> str:
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
    text = replace_surrogates(text)
    # The nonce hashes the text that it fences: the same in every run (replays and caches need that)
    # and out of reach for the text, which would have to contain its own hash. One a field, not one
    # a prompt: requests about the same answer then share a prefix that servers can cache.
    nonce = blake2b(f"{name}\0{text}".encode(), digest_size=8, key=b"minirler").hexdigest()
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"<{name}-{nonce}>\n{text}\n</{name}-{nonce}>"


def read_json(text: str | None, key: str, finish_reason: str = "stop") -> dict | None:
    """The first top-level JSON object in a reply that has `key`; None is missing. Never raises.

    Prose, code fences and a BOM around it do not matter. Closed thinking is skipped (a lone
    `</think>` ends thinking that the chat template began). Unclosed thinking, a reply cut by its
    token limit and an object that does not close are missing: what they hold may be a draft or a
    quotation. One trailing comma is tolerated. NaN and Infinity read as None.
    """
    if not isinstance(text, str) or finish_reason == "length":
        return None
    found, position = None, 0
    while mark := _MARK.search(text, position):
        position = mark.end()
        if mark[0] == "</think>":
            found = None
        elif mark[0] == "<think>":
            position = text.find("</think>", position) + len("</think>")
            if position < len("</think>"):
                return None
        else:
            value, position = _object_at(text, mark.start())
            if position < 0:  # does not close: nothing after this brace is at the top level
                return None if "think>" in text[mark.start() :] else found
            if found is None and key in value:
                found = value
    return found


def _object_at(text: str, start: int) -> tuple[dict, int]:
    """The object that opens at `start` ({} if it is no JSON) and where it ends (-1: nowhere)."""
    end, commas = _closing(text, start)
    body = text[start:end]  # decoded alone: an error counts the lines before it, in all of its text
    if len(commas) == 1:
        body = text[start : commas[0]] + text[commas[0] + 1 : end]
    try:
        return (joined(_DECODER.decode(body)) if end > 0 else {}), end
    except (ValueError, RecursionError):
        return {}, end


def _closing(text: str, start: int) -> tuple[int, list[int]]:
    """Where the brace at `start` is closed (-1: nowhere), and its trailing commas."""
    depth, is_string, commas = 0, False, []
    for token in _TOKEN.finditer(text, start):
        if token[0] == '"':
            is_string = not is_string
        elif not is_string and token[0] == ",":
            commas.append(token.start())
        elif not is_string and token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
            if depth == 0:
                return token.end(), commas
    return -1, []


class OpenAILM:
    """A model behind an OpenAI-compatible endpoint. Make one an endpoint: it holds the limiter.

    Limiter, deadline, retries and circuit are those of `Endpoint`; a reply that is no chat
    completion is tried again. Other failures are replies without text. Errors: ConfigError on 401,
    and on 403 and 404 until a request has succeeded (later they concern that one request), and for
    a `cache` in mode "replay" that is of another run. Use it from one event loop.
    """

    def __init__(
        self,
        model: str,
        base_url: str = "",
        api_key_env: str = "OPENAI_API_KEY",
        max_concurrent: int = 256,
        deadline_s: float = 600.0,
        retries: int = 3,
        first_wait_s: float = 0.5,
        max_wait_s: float = 60.0,
        cache: Cache | None = None,
    ):
        key = os.environ.get(api_key_env, "") if api_key_env else ""
        if not model:
            raise ConfigError("judge.model is empty: name the model that the endpoint serves")
        if not key and not base_url and (cache is None or cache.mode != "replay"):
            raise ConfigError(
                f"the environment variable {api_key_env} (judge.api_key_env) is not set: export "
                "it, or set judge.base_url to a server that needs no key"
            )
        if max_concurrent < 1 or not deadline_s > 0 or retries < 0:
            raise ConfigError(
                f"judge.max_concurrent ({max_concurrent}) must be at least 1, judge.deadline_s "
                f"({deadline_s}) above 0 and retries ({retries}) at least 0"
            )
        self.model, self._key_env, self._has_worked = model, api_key_env, False
        self.endpoint = Endpoint(
            "language model", base_url or OPENAI_URL, max_concurrent=max_concurrent,
            deadline_s=deadline_s, retries=retries, first_wait_s=first_wait_s,
            max_wait_s=max_wait_s, cache=cache,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip

    def with_model(self, model: str) -> "OpenAILM":
        """Another model of the same endpoint, behind the same limiter and connections."""
        sibling = copy.copy(self)
        sibling.model, sibling._has_worked = model, False
        return sibling

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request; see the class for what is retried and what raises."""
        body = {
            "model": self.model,
            "messages": list(request.messages),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
        }
        try:
            reply = await self.endpoint.request(
                "POST", "/chat/completions", json=body, read=self._read, salt=request.salt
            )
        except EndpointError as error:
            status, text = error.status, str(error)
        else:
            self._has_worked = True
            return reply
        if status == 401 or (status in (403, 404) and not self._has_worked):
            raise ConfigError(
                f"HTTP {status} from {self.endpoint.host}, model {self.model}: check the "
                f"key in {self._key_env}, judge.base_url (often ends in /v1) and judge.model"
            )
        return LMReply(None, "error", text)

    async def close(self) -> None:
        """Close the connections, those of `with_model` siblings too."""
        await self.endpoint.close()

    def _read(self, reply: Reply) -> LMReply:
        """ValueError for what is no chat completion: gateways send errors with status 200."""
        body = reply.json()
        try:
            choice = body["choices"][0]
            text, finish_reason = choice["message"]["content"], choice["finish_reason"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the reply is no chat completion: {str(body)[:100]}") from None
        usage = body.get("usage") or {}
        for name in ("prompt_tokens", "completion_tokens"):
            if isinstance(usage, dict) and isinstance(usage.get(name), int):
                setattr(self.endpoint.costs, name, getattr(self.endpoint.costs, name) + usage[name])
        if finish_reason == "length":
            return LMReply(replace_surrogates(text or ""), "length")
        if not isinstance(text, str) or finish_reason == "content_filter":
            return LMReply(None, "error", f"no text in the reply (finish reason {finish_reason})")
        return LMReply(replace_surrogates(text))

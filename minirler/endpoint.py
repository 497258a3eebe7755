"""One client a service: pooled connections, one limiter, deadlines, retries, a record of replies.

    search = Endpoint("serper", "https://...", headers={"X-API-KEY": key}, max_concurrent=32)
    hits = await search.request("POST", "/search", json={"q": "..."}, read=read_hits)

`read` turns a reply of status 200 to 299 into what the caller wants; a ValueError of it (prose, cut
JSON, another shape) is a failed try like a status of 500. What it accepts is recorded, and a later
run can be given the record instead of the service (`Cache`).

Not here: what is asked and what a reply means (`lm`, `web`). The keys of services are in headers,
which no record, no error and no log ever holds.
"""

import asyncio
import json as jsonlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import sha256
from typing import Any

import aiohttp
from yarl import URL

from .recording import Cache, Reply

TRIP = 10  # failed tries in a row that open the circuit
LONGEST_PAUSE_S = 60.0  # between two tries of an open circuit
PATIENCE_S = 600.0  # that a call stands still for open circuits, all together
SPARE_RETRIES = 50.0  # of an endpoint, before its successes have to pay for more
RETRIES_A_SUCCESS = 0.5
NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class EndpointError(Exception):
    """A request that failed for good. `status` is the last try's, 0 where there was no reply."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass
class Costs:
    """What an endpoint was asked for so far: tries, replies from the record, seconds, bytes."""

    tries: int = 0
    recorded: int = 0
    retries: int = 0
    failures: int = 0  # requests that failed for good
    pauses: int = 0  # of the circuit
    seconds: float = 0.0  # of the service, over all tries
    received: int = 0  # bytes
    prompt_tokens: int = 0  # of language models, which say so
    completion_tokens: int = 0


class Endpoint:
    """One service. Make one of each a process: it holds the limiter, the circuit and the budget.

    At most `max_concurrent` requests are in flight. `deadline_s` bounds a request from when it gets
    its slot, waits and retries included. Tried again, up to `retries` times: failed connections,
    408, 409, 429, 5xx, what `read` refuses, and, if the request is idempotent, connections that
    break later; after the server's Retry-After or a doubling wait with jitter, at most
    `max_wait_s`. An endpoint that mostly fails runs out of retries (SPARE_RETRIES). TRIP failed
    tries in a row open the circuit: requests stand still, which is not counted against their
    deadlines, while one at a time tries whether the service is back.
    """

    def __init__(
        self, name: str, base_url: str, *, max_concurrent: int = 64, deadline_s: float = 180.0,
        retries: int = 3, headers: dict[str, str] | None = None, cache: Cache | None = None,
        first_wait_s: float = 0.5, max_wait_s: float = 60.0, max_bytes: int = 16 << 20,
    ):  # fmt: skip
        self.name, self.costs = name, Costs()
        self._headers, self._cache = headers or {}, cache
        url = URL(base_url)  # aiohttp takes a login in the address or a header, not both
        self._base_url = str(url.with_user(None) if "Authorization" in self._headers else url)
        self._base_url = self._base_url.rstrip("/")
        self._max_concurrent, self._deadline_s, self._retries = max_concurrent, deadline_s, retries
        self._first_wait_s, self._max_wait_s, self._max_bytes = first_wait_s, max_wait_s, max_bytes
        self._random = random.Random()  # of its own: jitter must not move a seeded run's noise
        self._failed_in_a_row, self._spare = 0, SPARE_RETRIES
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def host(self) -> str:
        """The host alone: an address may hold a password."""
        return URL(self._base_url).host or self._base_url

    async def request(
        self, method: str, path: str, *, params: dict | None = None, json: Any = None,
        read: Callable[[Reply], Any] = lambda reply: reply, idempotent: bool = True, salt: str = "",
    ) -> Any:  # fmt: skip
        """What `read` makes of the reply; EndpointError where there is none.

        `salt` tells requests apart that are equal but must not share a recorded reply.
        """
        key = sha256(repr((self.name, method, path, params, jsonlib.dumps(json), salt)).encode())
        if self._cache is None:
            return await self._ask(method, path, params, json, read, idempotent)
        async with self._cache.lock(key.hexdigest()):
            if reply := self._cache.get(key.hexdigest()):
                self.costs.recorded += 1
                return read(reply)
            if self._cache.mode == "replay":
                self.costs.failures += 1
                raise EndpointError(0, "there is no reply on record: the request had failed")

            def accept(reply: Reply) -> Any:
                value = read(reply)
                self._cache.put(key.hexdigest(), reply)
                return value

            return await self._ask(method, path, params, json, accept, idempotent)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, *request) -> Any:
        self._open_session()
        async with self._limit:
            try:
                async with asyncio.timeout(self._deadline_s) as deadline:
                    return await self._tries(deadline, *request)
            except TimeoutError:
                self.costs.failures += 1
                self._failed_in_a_row += 1
                raise EndpointError(0, f"no reply within {self._deadline_s:g} s") from None
            except EndpointError:
                self.costs.failures += 1
                raise

    def _open_session(self) -> None:
        """Connections and limiter belong to an event loop; a new loop gets new ones."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, connector = asyncio.get_running_loop(), aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, trust_env=True
            )
            self._limit = asyncio.Semaphore(self._max_concurrent)
            self._probe = asyncio.Lock()

    async def _tries(self, deadline: asyncio.Timeout, method, path, params, json, read, idempotent):
        clock = asyncio.get_running_loop().time
        for attempt in range(self._retries + 1):
            error, asked_s = None, None
            async with _Circuit(self, deadline):
                try:
                    return self._succeeded(read(await self._send(method, path, params, json)))
                except StatusError as found:
                    error, asked_s = found, retry_after_s(found.retry_after)
                    can_retry = found.status in (408, 409, 429) or found.status >= 500
                except ValueError as found:  # of `read`, or a body that is too long
                    error, can_retry = EndpointError(0, self._clean(str(found))), True
                except (aiohttp.ClientError, OSError) as found:
                    text = self._clean(f"{type(found).__name__}: {found}")
                    error = EndpointError(0, text)
                    can_retry = idempotent or isinstance(found, NOT_SENT)
                self._failed_in_a_row += can_retry
            wait_s = self._first_wait_s * 2**attempt if asked_s is None else asked_s
            wait_s = min(wait_s * (1 + 0.25 * self._random.random()), self._max_wait_s)
            is_last = attempt == self._retries or clock() + wait_s >= deadline.when()
            if not can_retry or is_last or self._spare < 1:
                raise EndpointError(error.status, str(error))  # outside: no request in its context
            self._spare -= 1
            self.costs.retries += 1
            await asyncio.sleep(wait_s)

    def _succeeded(self, value: Any) -> Any:
        self._failed_in_a_row = 0
        self._spare = min(SPARE_RETRIES, self._spare + RETRIES_A_SUCCESS)
        return value

    async def _send(self, method: str, path: str, params, json) -> Reply:
        """One try. StatusError outside of 200 to 299, ValueError for a body beyond `max_bytes`."""
        loop = asyncio.get_running_loop()
        started, url = loop.time(), self._base_url + path
        self.costs.tries += 1
        timeout = aiohttp.ClientTimeout(total=None, connect=min(10.0, self._deadline_s))
        try:
            async with self._session.request(
                method, url, params=params, json=json, timeout=timeout, allow_redirects=False
            ) as response:
                body = await read_body(response, self._max_bytes)
        finally:
            self.costs.seconds += loop.time() - started
        self.costs.received += len(body)
        headers = {name.lower(): value for name, value in response.headers.items()}
        if not 200 <= response.status < 300:
            text = f"HTTP {response.status}: {body[:300].decode('utf-8', 'replace')}"
            raise StatusError(response.status, self._clean(text), headers.get("retry-after", ""))
        return Reply(response.status, {"content-type": headers.get("content-type", "")}, body)

    def _clean(self, text: str) -> str:
        """One short line without what the headers hold."""
        for value in self._headers.values():
            for secret in (value, value.removeprefix("Bearer ")):
                text = text.replace(secret, "***") if secret else text
        return " ".join(text.split())[:300]


class StatusError(EndpointError):
    """A reply of another status than 200 to 299."""

    def __init__(self, status: int, message: str, retry_after: str):
        super().__init__(status, message)
        self.retry_after = retry_after


class _Circuit:
    """Entered before a try: stands still while the circuit of `endpoint` is open.

    The one that holds `_probe` waits a doubling time and tries; the others wait for what it finds.
    Time that passes here is added to the deadline, up to PATIENCE_S.
    """

    def __init__(self, endpoint: Endpoint, deadline: asyncio.Timeout):
        self.endpoint, self.deadline, self.holds = endpoint, deadline, False

    async def __aenter__(self) -> None:
        endpoint, loop = self.endpoint, asyncio.get_running_loop()
        if endpoint._failed_in_a_row < TRIP:
            return
        started, when = loop.time(), self.deadline.when()
        self.deadline.reschedule(when + PATIENCE_S)
        await endpoint._probe.acquire()
        self.holds = True
        try:
            if endpoint._failed_in_a_row >= TRIP:
                endpoint.costs.pauses += 1
                doublings = endpoint._failed_in_a_row - TRIP
                await asyncio.sleep(min(2.0 ** min(doublings, 9), LONGEST_PAUSE_S))
            else:
                self._release()
            self.deadline.reschedule(when + loop.time() - started)
        except BaseException:
            self._release()
            raise

    async def __aexit__(self, *_) -> None:
        self._release()

    def _release(self) -> None:
        if self.holds:
            self.holds = False
            self.endpoint._probe.release()


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body; ValueError as soon as it is longer than `limit` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"the reply is longer than {limit} bytes")
    return bytes(body)


def retry_after_s(value: str) -> float | None:
    """Seconds that a Retry-After header asks for (a number or an HTTP date); None if unreadable."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value.strip(), re.ASCII):
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except (TypeError, ValueError, OverflowError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())

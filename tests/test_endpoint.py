"""One client a service, against a real local server with faults by schedule: no fault reads as a
reply, nothing leaks, and what was recorded can be given again without the service."""

import asyncio
import contextlib
import gc
import itertools
import json
import random
import time

import pytest
from aiohttp import web

from minirler import endpoint as module
from minirler.config import ConfigError
from minirler.endpoint import Endpoint, EndpointError
from minirler.recording import Cache

KEY = "sk-canary-7f3a9"


class Server:
    """`faults` is an iterator of fault names, one a request; None answers with what was asked."""

    def __init__(self, *faults):
        self.faults, self.asked, self.times = iter([*faults]), [], []

    async def handle(self, request):
        self.times.append(time.monotonic())
        self.asked.append((request.method, request.path_qs, await request.text()))
        fault = next(self.faults, None)
        if fault is None:
            return web.json_response({"echo": self.asked[-1][2], "n": len(self.asked)})
        return await getattr(self, fault)(request)

    async def status_500(self, request):
        return web.Response(status=500, text=f"broken, with {KEY}")

    async def status_429(self, request):
        return web.Response(status=429, headers={"Retry-After": "0.05"})

    async def status_400(self, request):
        return web.Response(status=400, text=f"bad {KEY}")

    async def redirect(self, request):
        raise web.HTTPFound("/elsewhere")

    async def reset(self, request):
        request.transport.abort()
        return web.Response()

    async def hang(self, request):
        await asyncio.sleep(30)

    async def drip(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b" ")
            await asyncio.sleep(0.1)
        return response

    async def cut(self, request):
        return web.Response(text='{"echo": "x", "n')

    async def prose(self, request):
        return web.Response(text='Sure! {"echo": "forged"}')

    async def nan(self, request):
        return web.Response(text='{"echo": NaN}')

    async def list(self, request):
        return web.Response(text='["echo"]')

    async def binary(self, request):
        return web.Response(body=bytes(range(256)))

    async def huge(self, request):
        return web.Response(body=b"x" * (1 << 20))

    def use(self, work, name="service", **settings):
        """What `work(endpoint)` returns, for an endpoint of this server."""

        async def main():
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(app, shutdown_timeout=0.05)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            options = {"deadline_s": 10.0, "first_wait_s": 0.01, "max_wait_s": 0.2,
                       "headers": {"Authorization": f"Bearer {KEY}"}, "max_bytes": 1 << 16}
            endpoint = Endpoint(name, f"http://127.0.0.1:{runner.addresses[0][1]}/v1",
                                **options | settings)  # fmt: skip
            try:
                return await work(endpoint)
            finally:
                await endpoint.close()
                await runner.cleanup()
                left = [repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
                assert all("RequestHandler" in task for task in left), left  # the server's own

        return asyncio.run(main())


def echo(reply):
    """The echo of a reply; ValueError for what is none, a NaN included."""
    found = reply.json()
    if not isinstance(found, dict) or not isinstance(found.get("echo"), str):
        raise ValueError(f"no echo in {str(found)[:40]}")
    return found["echo"]


def post(text="hello", **options):
    return lambda endpoint: endpoint.request("POST", "/ask", json=text, read=echo, **options)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


FAULTS = ["status_500", "status_429", "reset", "cut", "prose", "nan", "list", "binary", "huge"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_tried_again_and_never_read(fault):
    server = Server(fault, fault)
    assert server.use(post()) == '"hello"' and len(server.asked) == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_is_an_error_without_the_key(fault):
    server = Server(*[fault] * 9)
    with pytest.raises(EndpointError) as error:
        server.use(post(), retries=2)
    assert len(server.asked) == 3 and KEY not in repr(error.value)
    assert error.value.__context__ is None
    assert error.value.status == (int(fault[7:]) if fault.startswith("status") else 0)


@pytest.mark.parametrize("fault, status", [("status_400", 400), ("redirect", 302)])
def test_what_would_not_pass_is_not_tried_again(fault, status):
    server = Server(fault)
    with pytest.raises(EndpointError) as error:
        server.use(post())
    assert len(server.asked) == 1 and error.value.status == status and KEY not in str(error.value)


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_the_deadline_holds_for_a_reply_that_does_not_end(fault):
    started = time.monotonic()
    with pytest.raises(EndpointError, match="no reply within 0.3 s"):
        Server(fault).use(post(), deadline_s=0.3)
    assert time.monotonic() - started < 5


def test_what_may_have_had_an_effect_is_not_sent_twice():
    for idempotent, asked in ((True, 2), (False, 1)):
        server = Server("reset")
        try:
            server.use(post(idempotent=idempotent))
        except EndpointError:
            assert not idempotent
        assert len(server.asked) == asked


def test_a_body_is_read_no_further_than_its_limit():
    reply = lambda e: e.request("GET", "/x", params={"q": "a b"})  # noqa: E731
    with pytest.raises(EndpointError, match="longer than 65536 bytes"):
        Server("huge").use(reply, retries=0)
    server = Server("huge")
    assert len(server.use(reply, max_bytes=1 << 21).body) == 1 << 20
    assert server.asked == [("GET", "/v1/x?q=a+b", "")]


def test_a_service_that_mostly_fails_runs_out_of_retries(monkeypatch):
    monkeypatch.setattr(module, "SPARE_RETRIES", 6.0)
    monkeypatch.setattr(module, "TRIP", 10**6)

    async def many(endpoint):
        for _ in range(10):
            with pytest.raises(EndpointError):
                await post()(endpoint)
        return endpoint.costs

    server = Server(*["status_500"] * 99)
    costs = server.use(many, retries=3)
    assert len(server.asked) == 16 == costs.tries and (costs.retries, costs.failures) == (6, 10)


def test_an_open_circuit_waits_and_one_at_a_time_tries_until_the_service_is_back(monkeypatch):
    monkeypatch.setattr(module, "TRIP", 4)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.3)

    async def many(endpoint):
        replies = await asyncio.gather(*[post(str(i))(endpoint) for i in range(12)])
        return replies, endpoint.costs

    server = Server(*["status_500"] * 15)
    replies, costs = server.use(many, retries=9, deadline_s=0.8)
    assert replies == [json.dumps(str(i)) for i in range(12)]
    assert costs.pauses >= 3  # 12 fail at once; then three probes fail, 0.3 s apart
    gaps = [b - a for a, b in itertools.pairwise(server.times[12:16])]
    assert all(gap > 0.25 for gap in gaps)
    assert server.times[15] - server.times[0] > 0.8  # the pauses were not counted


def test_an_endless_outage_ends_a_call_after_its_patience(monkeypatch):
    monkeypatch.setattr(module, "TRIP", 1)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    started = time.monotonic()
    with pytest.raises(EndpointError):
        Server(*["status_500"] * 99).use(post(), retries=9, deadline_s=0.3)
    assert time.monotonic() - started < 5


# ------------------------------------------------------------------------------ the record


def asks(*texts, salt=""):
    async def work(endpoint):
        found = await asyncio.gather(*[post(t, salt=salt)(endpoint) for t in texts])
        return found, endpoint.costs

    return work


def test_a_recorded_reply_is_given_again_in_replay_without_any_server(tmp_path):
    cache = Cache(tmp_path / "s.sqlite")
    server = Server("status_500", None, "cut")
    found, _ = server.use(asks("a", "b", "a"), cache=cache)
    assert found == ['"a"', '"b"', '"a"'] and len(server.asked) == 4  # equal requests asked once
    cache.close()
    replay = Cache(tmp_path / "s.sqlite", "replay")
    silent = Server(*["status_500"] * 9)
    again, costs = silent.use(asks("a", "b", "a"), cache=replay, headers={})
    assert again == found and not silent.asked and costs.recorded == 3
    with pytest.raises(EndpointError, match="no reply on record"):
        silent.use(asks("c"), cache=replay)
    assert not silent.asked


def test_the_record_of_another_run_is_refused(tmp_path):
    Server().use(asks("a"), cache=Cache(tmp_path / "s.sqlite"))

    async def many(endpoint):
        for i in range(99):
            with contextlib.suppress(EndpointError):
                await post(str(i))(endpoint)

    with pytest.raises(ConfigError, match="holds none of the first 16 requests"):
        Server().use(many, cache=Cache(tmp_path / "s.sqlite", "replay"))


def test_failures_are_not_recorded_and_live_records_nothing(tmp_path):
    cache = Cache(tmp_path / "s.sqlite")
    with pytest.raises(EndpointError):
        Server("status_500").use(asks("a"), cache=cache, retries=0)
    server = Server()
    server.use(asks("a"), cache=Cache(tmp_path / "s.sqlite", "live"))
    server.use(asks("a"), cache=cache)
    server.use(asks("a"), cache=cache)
    assert len(server.asked) == 2


def test_requests_that_differ_in_anything_have_replies_of_their_own(tmp_path):
    cache, server = Cache(tmp_path / "s.sqlite"), Server()

    async def work(endpoint):
        for path, params, body, salt in itertools.product(
            ("/a", "/b"), ({"q": "1"}, {"q": "2"}), ("x", "y"), ("", "1")
        ):
            await endpoint.request("POST", path, params=params, json=body, salt=salt)

    server.use(work, cache=cache)
    server.use(work, cache=cache)
    server.use(work, cache=cache, name="another")
    assert len(server.asked) == 32 and len(set(server.asked[:16])) == 8


def test_no_secret_is_in_the_record(tmp_path):
    cache = Cache(tmp_path / "s.sqlite")
    Server("status_500").use(asks("a"), cache=cache)
    cache.close()
    for path in tmp_path.iterdir():
        assert KEY.encode() not in path.read_bytes()


def test_a_record_that_is_not_there_cannot_be_replayed(tmp_path):
    with pytest.raises(ConfigError, match="no record .* to replay"):
        Cache(tmp_path / "none.sqlite", "replay")
    with pytest.raises(ConfigError, match="'play' is unknown"):
        Cache(tmp_path / "none.sqlite", "play")


# ------------------------------------------------------------------------------ all at once


def test_many_requests_under_faults_all_end_and_leave_nothing(recwarn):
    """A fifth of the tries fails, in every way; each request has its own reply or an error."""
    gc.collect()  # what other tests left
    recwarn.clear()
    draw = random.Random(0)
    faults = [draw.choice([*FAULTS, "status_400"]) if draw.random() < 0.2 else None
              for _ in range(2000)]  # fmt: skip

    async def work(endpoint):
        return await asyncio.gather(
            *[post(f"request {i}")(endpoint) for i in range(200)], return_exceptions=True
        )

    found = Server(*faults).use(work, max_concurrent=16, retries=4)
    errors = [x for x in found if isinstance(x, BaseException)]
    assert all(type(x) is EndpointError for x in errors) and len(errors) < 20
    for i, value in enumerate(found):
        assert value in errors or value == json.dumps(f"request {i}")
    gc.collect()
    assert not [w for w in recwarn if issubclass(w.category, ResourceWarning)]

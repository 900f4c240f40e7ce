"""Routes, methods, request ids and cross-origin requests of the HTTP API, in this process and without a model."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.gateway_service import (
    make_service,
    make_service_with_files,
    make_service_with_model,
)
from support.models.tokenizers import model_files

from modelswarm import __version__
from modelswarm_gateway.api.http.app import ROUTES, build_http_app
from modelswarm_gateway.generation.request import GenerationRequest, TextPrompt, TokenPrompt
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from tools.dashboard.metric_registries import BLOCKS, MODEL, make_hello

NOT_COMPILED = "tokenizer_config.json: the chat template does not compile"
ORIGIN = "https://chat.example.com"
CHAT = "/v1/chat/completions"
BODY = {"model": "none", "messages": [{"role": "user", "content": "hi"}]}


def make_client(
    cors_origins: Sequence[str] = (), ports: Mapping[str, int] | None = None
) -> httpx.AsyncClient:
    service, _ = make_service_with_model()
    app = build_http_app(service, None, cors_origins, ports)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/health", 200),
        ("/live", 200),
        ("/ready", 503),
        ("/version", 200),
        ("/v1/models", 200),
        (f"/v1/models/{MODEL}", 200),
        ("/v1/models/none", 404),
    ],
)
async def test_head_is_allowed_where_get_is(path: str, status: int) -> None:
    client = make_client()
    assert (await client.head(path)).status_code == status
    assert (await client.get(path)).status_code == status
    refused = await client.post(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
    assert "allowed: GET, HEAD" in error_of(refused)["message"]


async def test_models_are_listed_behind_a_slash_too() -> None:
    client = make_client()
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        listed = (await client.get("/v1/models", headers=headers)).json()
        assert (await client.get("/v1/models/", headers=headers)).json() == listed


async def test_refused_method_is_told_all_of_its_path() -> None:
    client = make_client()
    for path in ("/v1/responses/none", "/v1/sessions/none"):
        refused = await client.put(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "DELETE, GET, HEAD")
    assert (await client.get("/v1/sessions")).headers["allow"] == "POST"
    assert (await client.head("/v1/responses/none")).status_code == 404
    assert (await client.head("/v1/responses/none/input_items")).status_code == 404


async def test_version_names_protocol_and_grpc_ports() -> None:
    answer = await make_client(ports={"grpc": 8123, "admin": 8125}).get("/version")
    assert answer.json() == {
        "version": __version__,
        "protocol": "2.4",
        "grpc_port": 8123,
        "admin_port": 8125,
    }


async def test_ready_shows_no_identity_and_no_address() -> None:
    """The boot nonce and the link port of a server are what its links ask for."""
    service, node = make_service_with_model()
    node.on_link_down("s0/1/x", "gone")
    hello = make_hello("s1", 0, BLOCKS)
    node.on_link_up("s1/1/0a1b2c3d", replace(hello, last=0, target="10.0.0.7:7000"))
    app = build_http_app(service, None, ())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")
    answer = await client.get("/ready")
    assert "cannot link to s1" in answer.json()["reason"]
    assert "0a1b2c3d" not in answer.text
    assert "10.0.0.7" not in answer.text


async def test_ready_says_what_a_model_waits_for() -> None:
    service, node = make_service_with_model()
    app = build_http_app(service, None, ())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")

    body = (await client.get("/ready")).json()
    assert body["reason"].startswith(f"{MODEL}: its tokenizer waits for tokenizer.json, ")
    [model] = body["models"]
    assert (model["phase"], model["chat_problem"]) == ("tokenizer", None)
    assert model["reason"].endswith(" from s0")
    chat = await client.post(CHAT, json=BODY | {"model": MODEL})
    assert "its tokenizer waits for tokenizer.json" in error_of(chat)["message"]

    node.on_link_down("s0/1/x", "gone")
    body = (await client.get("/ready")).json()
    assert (body["models"][0]["phase"], body["models"][0]["tokenizer_loaded"]) == (
        "linking servers",
        False,
    )
    assert f"{MODEL}: no server for blocks 0:{BLOCKS}" in body["reason"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models"])
async def test_unknown_path_is_told_the_routes(path: str) -> None:
    answer = await make_client().get(path)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    assert "ModelSwarm" in error_of(answer)["message"]
    assert "POST /v1/chat/completions" in error_of(answer)["message"]


async def test_named_routes_exist_and_browsers_may_use_their_methods() -> None:
    client = make_client(["*"])
    preflight = {"origin": "https://x.example", "access-control-request-method": "DELETE"}
    browsers = (await client.options("/v1/models", headers=preflight)).headers
    for route in ROUTES.split(", "):
        method, path = route.split()
        answer = await client.request(method, path.replace("{id}", "nosuch?model=other"))
        assert "there is nothing at" not in answer.text
        assert method in browsers["access-control-allow-methods"].split(", ")


async def test_long_texts_are_shortened_in_errors() -> None:
    client, name = make_client(), "x" * 10_000
    for answer in (
        await client.post(CHAT, json=BODY | {"model": name}),
        await client.get(f"/v1/models/{name}"),
        await client.get(f"/{name}"),
    ):
        assert answer.status_code == 404
        assert len(answer.content) < 700
        assert "…" in error_of(answer)["message"]


@pytest.mark.parametrize("given", ["abc-123", "req_1/2", "x" * 128])
async def test_request_id_of_the_client_is_returned(given: str) -> None:
    for answer in (
        await make_client().get("/health", headers={"x-request-id": given}),
        await make_client().post(CHAT, json=BODY, headers={"X-Request-ID": given}),
    ):
        assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"two words", b"caf\xe9"])
async def test_invalid_request_id_is_replaced(given: bytes) -> None:
    answer = await make_client().get("/health", headers=[(b"x-request-id", given)])
    assert answer.status_code == 200
    assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])


async def test_client_of_anthropic_gets_the_id_of_its_request() -> None:
    client, headers = make_client(), {"anthropic-version": "2023-06-01", "x-request-id": "mine"}
    for path in ("/v1/models", "/v1/models/none", "/v1/messages/none"):
        answer = await client.get(path, headers=headers)
        assert answer.headers["request-id"] == "mine"
    assert "request-id" not in (await client.get("/v1/models")).headers


async def test_two_request_ids_are_replaced_by_one() -> None:
    headers = [("x-request-id", "a"), ("x-request-id", "b")]
    answer = await make_client().get("/health", headers=headers)
    assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])


async def test_request_is_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = make_client()
    await client.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
    await client.post("/%0Aforged", headers={"x-request-id": "other"})
    await client.get("/health", headers={"x-request-id": "probe"})
    lines = [record.getMessage() for record in caplog.records if "request " in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith(f"request mine: POST {CHAT}: 404 model_not_found after ")
    assert lines[1].startswith("request other: POST /%0Aforged: 404 not_found after ")


async def test_log_names_no_session_and_no_response(caplog: pytest.LogCaptureFixture) -> None:
    """The name of a session is the right to continue it."""
    caplog.set_level(logging.INFO)
    client = make_client()
    await client.post("/v1/sessions/my%2Fsecret/fork?model=none", json={})
    await client.delete("/v1/sessions/secret/forks?model=none")
    await client.delete(f"/v1/responses/resp_{'5ec7e7' * 10}")
    lines = [record.getMessage() for record in caplog.records if "request " in record.getMessage()]
    assert [line.split(": ")[1] for line in lines] == [
        "POST /v1/sessions/.../fork",
        "DELETE /v1/sessions/...",
        "DELETE /v1/responses/...",
    ]


async def test_compressed_body_is_refused_with_415() -> None:
    body = gzip.compress(b"{}")
    answer = await make_client().post(CHAT, content=body, headers={"content-encoding": "gzip"})
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    assert "gzip" in error_of(answer)["message"]
    plain = await make_client().post(CHAT, json=BODY, headers={"content-encoding": "identity"})
    assert plain.status_code == 404


async def test_half_of_a_surrogate_pair_in_an_inner_text_is_named() -> None:
    outputs = {"structural_tag": '{"\\ud800": 1}'}
    answer = await make_client().post(CHAT, json=BODY | {"structured_outputs": outputs})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "unknown_parameter")
    assert error_of(answer)["param"] == r"structured_outputs.structural_tag.\ud800"


PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_cors_is_off_by_default() -> None:
    client = make_client()
    refused = await client.options(CHAT, headers=PREFLIGHT)
    assert refused.status_code == 405
    assert "--cors-origin" in error_of(refused)["message"]
    answer = await client.get("/v1/models", headers={"origin": ORIGIN})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [(["*"], "*"), ([ORIGIN], ORIGIN), (["http://localhost:3000", ORIGIN], ORIGIN)],
)
async def test_allowed_origin_may_send_requests(origins: list[str], allowed: str) -> None:
    client = make_client(origins)
    before = await client.options(CHAT, headers=PREFLIGHT)
    assert (before.status_code, before.content) == (204, b"")
    assert before.headers["access-control-allow-origin"] == allowed
    assert before.headers["access-control-allow-methods"] == "DELETE, GET, HEAD, POST"
    wanted = PREFLIGHT["access-control-request-headers"]
    assert before.headers["access-control-allow-headers"] == wanted
    for answer in (
        await client.post(CHAT, json=BODY, headers={"origin": ORIGIN}),
        await client.get("/health", headers={"origin": ORIGIN}),
    ):
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert ("vary" in answer.headers) is (allowed != "*")


async def test_other_origin_is_refused_before_its_request() -> None:
    client = make_client([ORIGIN])
    refused = await client.options(CHAT, headers=PREFLIGHT | {"origin": "https://evil.example"})
    assert refused.status_code == 400
    assert f"allowed: {ORIGIN}" in error_of(refused)["message"]
    answer = await client.get("/health", headers={"origin": "https://evil.example"})
    for each in (refused, answer):
        assert "access-control-allow-origin" not in each.headers
        assert each.headers["vary"] == "Origin"


async def test_stopping_gateway_closes_connections() -> None:
    service, _ = make_service()
    app = build_http_app(service)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://here"
    ) as client:
        assert "connection" not in (await client.get("/health")).headers
        service.shutting_down = True
        assert (await client.get("/health")).headers["connection"] == "close"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "line\n{% oops %}",
            f"{NOT_COMPILED}: line 2: Encountered unknown tag 'oops'.; text completions work",
        ),
        (None, "this model has no chat template; text completions work"),
    ],
)
async def test_model_that_cannot_chat_says_so_and_completes(
    template: str | None, problem: str
) -> None:
    service, node = await make_service_with_files(model_files(template=template))
    app = build_http_app(service)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")

    (entry,) = (await client.get("/v1/models")).json()["data"]
    assert (entry["ready"], entry["chat"], entry["chat_problem"]) == (True, False, problem)
    refused = await client.post(CHAT, json=BODY | {"model": MODEL})
    assert refused.status_code == 400
    assert error_of(refused)["message"] == f"messages: {problem}"
    assert error_of(refused)["param"] == "messages"
    for prompt in (TextPrompt("hi"), TokenPrompt((5, 6))):
        request = GenerationRequest(MODEL, prompt, "prompt", SamplingOptions(max_tokens=1))
        generation = await service.start_generation(request)
        generation.close()
    await node.shut_down()


async def test_model_that_can_chat_says_so() -> None:
    service, node = await make_service_with_files(model_files())
    app = build_http_app(service)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")
    (entry,) = (await client.get("/v1/models")).json()["data"]
    assert (entry["chat"], entry["chat_problem"]) == (True, None)
    await node.shut_down()


async def test_unusable_tokenizer_files_are_named_to_clients() -> None:
    service, node = await make_service_with_files({"tokenizer.json": b"{"})
    app = build_http_app(service)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")
    (entry,) = (await client.get("/v1/models")).json()["data"]
    assert (entry["chat"], entry["chat_problem"], entry["vocab_size"]) == (None, None, None)
    refused = await client.post(CHAT, json=BODY | {"model": MODEL})
    assert refused.status_code == 503
    assert "its tokenizer files cannot be used: tokenizer.json: " in error_of(refused)["message"]
    assert "tokenizer.json: " in (await client.get("/ready")).json()["reason"]
    await node.shut_down()


async def test_requests_outside_generations_are_counted() -> None:
    service, _ = make_service_with_model()
    app = build_http_app(service)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")

    def counted(code: str, model: str = "other") -> float:
        labels = {"model": model, "code": code}
        name = "modelswarm_gateway_requests_total"
        return service.metrics.registry.get_sample_value(name, labels) or 0.0

    prompt = {"model": "none", "prompt": "x"}
    await client.post("/tokenize", json=prompt)
    await client.post("/v1/nothing")
    await client.post("/detokenize", json={"model": MODEL, "tokens": [1]})
    assert (counted("404"), counted("503", MODEL)) == (2, 1)
    await client.post("/v1/completions", json=prompt, headers={"x-modelswarm-forwarded": "1"})
    await client.get("/v1/nothing")
    assert counted("404") == 2


TEXT = {"origin": "https://evil.example", "content-type": "text/plain"}


@pytest.mark.parametrize("path", [CHAT, "/v1/sessions", "/v1/responses", "/v1/messages"])
async def test_text_of_a_page_of_another_origin_is_refused(path: str) -> None:
    client = make_client([ORIGIN])
    for headers in (TEXT, {"origin": "null"}, TEXT | {"content-type": "text/plain;a=b"}):
        refused = await client.post(path, content=json.dumps(BODY), headers=headers)
        assert refused.status_code == 400
        assert "must send application/json" in error_of(refused)["message"]


async def test_text_is_read_from_allowed_pages_and_programs() -> None:
    client, other = make_client([ORIGIN]), make_client()
    for each, headers in (
        (client, TEXT | {"origin": ORIGIN}),
        (other, {"content-type": "text/plain"}),
        (other, TEXT | {"content-type": "application/json; charset=utf-8"}),
    ):
        answer = await each.post(CHAT, content=json.dumps(BODY), headers=headers)
        assert error_of(answer)["code"] == "model_not_found"


async def test_page_of_another_name_of_the_gateway_is_refused() -> None:
    client = make_client()
    for host, is_refused in (("evil.example:8000", True), ("evil.example", False)):
        headers = {"host": host, "origin": f"http://{host}"}
        answer = await client.post(f"http://here:8000{CHAT}", json=BODY, headers=headers)
        assert (error_of(answer)["param"] == "Origin") is is_refused

"""A proxy in front of vLLM servers that prefill and vLLM servers that decode.

    python examples/vllm_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It asks a prefill server for one token, passes what that server says of the transfer (`kv_transfer_params`) on to a decode
server, and streams decode's answer. If prefill cannot be reached, decode computes the request alone. Requires aiohttp, which
vLLM requires too.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Iterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

logger = logging.getLogger("vllm_proxy")

PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
ONE_TOKEN = {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": PREFILL_PARAMS}
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens")
PASSED_ON = ("Authorization", "X-Request-Id")


class Proxy:
    """Takes the servers of each side in turn."""

    def __init__(self, prefills: list[str], decodes: list[str]) -> None:
        self._prefills, self._decodes = itertools.cycle(prefills), itertools.cycle(decodes)
        self._num_prefills = len(prefills)
        self._client: ClientSession

    def application(self) -> web.Application:
        """The routes of the proxy."""
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self._open_client)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_route("*", "/{other:.*}", self._ask_decode)
        return app

    async def _open_client(self, _: web.Application) -> Any:
        self._client = ClientSession(timeout=ClientTimeout(total=None, sock_connect=5))
        yield
        await self._client.close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        for url in itertools.islice(self._prefills, self._num_prefills):
            try:
                params = await self._prefill(url + request.path, body, headers)
            except ClientError as error:
                logger.warning("prefill server %s: %s", url, error)
                continue
            if params is not None:
                body = {**body, "kv_transfer_params": params}
            break
        return await self._stream(request, next(self._decodes) + request.path, headers, json=body)

    async def _prefill(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
        """What decode needs to know; `None` if it must compute the prompt. Raises `ClientError` if the server failed."""
        asked = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL} | ONE_TOKEN
        async with self._client.post(url, json=asked, headers=headers) as answer:
            if answer.status >= 500:
                answer.raise_for_status()
            return (await answer.json()).get("kv_transfer_params") if answer.ok else None

    async def _ask_decode(self, request: web.Request) -> web.StreamResponse:
        """Other requests, such as for the list of models."""
        return await self._stream(request, next(self._decodes) + request.path_qs, {}, data=await request.read())

    async def _stream(self, request: web.Request, url: str, headers: dict[str, str], **content: Any) -> web.StreamResponse:
        async with self._client.request(request.method, url, headers=headers, **content) as answer:
            kept = {name: answer.headers[name] for name in ("Content-Type",) if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


def addresses(given: list[list[str]]) -> Iterator[str]:
    """The addresses of servers, without a slash at the end."""
    return (address.rstrip("/") for addresses in given for address in addresses)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", nargs="+", action="append", required=True, metavar="URL", help="servers that prefill")
    parser.add_argument("--decode", nargs="+", action="append", required=True, metavar="URL", help="servers that decode")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(list(addresses(given.prefill)), list(addresses(given.decode)))
    web.run_app(proxy.application(), host=given.host, port=given.port)


if __name__ == "__main__":
    main()

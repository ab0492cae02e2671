"""A prefill server on another host that is killed while its requests travel: decode fails them, and loses no page."""

from __future__ import annotations

import contextlib
import itertools
import os
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.chaos.places import Hosts, inside, missing_for_places, slow_down
from harness.servers import Reply, Server
from harness.vllm.models import write_model
from tests.integrations.vllm.requests import prompts

needs_places = pytest.mark.skipif(bool(missing_for_places()), reason=f"needs {missing_for_places()}")
RATE = "20mbit"
NUM_KILLS = int(os.environ.get("TEST_KILLS", "3"))
ASKED = prompts((1200, 1100, 1000), seed=90)


@needs_places
def test_prefill_on_another_host_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only a server without requests empties its cache. SGLang itself ends if its pools are not free then."""
    folder, rooms = write_model("llama", tmp_path_factory.mktemp("models") / "llama"), itertools.count(2**61)
    with Server.sglang(folder) as alone:
        alone.wait_ready()
        expected = [alone.complete(prompt, max_tokens=4, stream=False) for prompt in ASKED]
    with contextlib.closing(Hosts()) as hosts, inside(hosts.namespaces[0]), contextlib.ExitStack() as stack:

        def begin(host: int, mode: str) -> Server:
            address = hosts.addresses[host]
            own = {"SGLANG_HOST_IP": address, "DISAGG_BACKEND": "nixl", "DISAGG_INSECURE": "1", "DISAGG_TRUSTED_NETWORK": "1"}
            server = Server.sglang(folder, "--host", address, mode=mode, instead_of=None, **own)
            server.url = f"http://{address}:{server.port}"
            return stack.enter_context(server)

        def decoded(room: int, prompt: list[int]) -> Reply:
            return decode.complete(prompt, max_tokens=4, stream=False, **where(room))

        def where(room: int) -> dict[str, Any]:
            place = {"bootstrap_host": hosts.addresses[1], "bootstrap_port": prefill.bootstrap_port}
            return {**place, "bootstrap_room": room}

        with inside(hosts.namespaces[1]):
            slow_down(RATE)
            prefill = begin(1, "prefill")
        decode = begin(0, "decode").wait_ready()
        for killed in range(NUM_KILLS + 1):
            prefill.wait_ready()
            with ThreadPoolExecutor(2 * len(ASKED)) as pool:
                found = []
                for prompt in ASKED:
                    room = next(rooms)
                    pool.submit(prefill.complete, prompt, max_tokens=4, stream=False, **where(room))
                    found.append(decoded(room, prompt))
                for one, other in zip(found, expected, strict=True):
                    assert one.tokens == other.tokens
                    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
                if killed == NUM_KILLS:
                    break
                given = [(next(rooms), prompt) for prompt in ASKED]
                for room, prompt in given:
                    pool.submit(prefill.complete, prompt, max_tokens=4, stream=False, **where(room))
                answers = [pool.submit(decoded, room, prompt) for room, prompt in given]
                decode.wait_queued("decode_transfer")
                prefill.kill()
                for answer in answers:
                    with pytest.raises(urllib.error.HTTPError, match="500"):
                        answer.result()
            decode.flush()
            decode.wait_ready()
            with inside(hosts.namespaces[1]):
                prefill = begin(1, "prefill")

"""Several prefill and decode workers that join and die while requests run: `python examples/xpyd.py`.

Two prefill and two decode workers serve requests in every combination. A third decode worker joins. A prefill worker is
killed, and the other one retries its requests with the next attempt number. No other worker restarts. Every answer is
compared with that of a single worker.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from disagg import new_request_id  # noqa: E402
from examples.minimal_server import Remote, generate, introduce, started  # noqa: E402


class Router:
    """Sends each request to one prefill and one decode worker, and to others if it fails."""

    def __init__(self) -> None:
        self.prefills: list[Remote] = []
        self.decodes: list[Remote] = []
        self.open: dict[str, tuple[dict[str, Any], Remote]] = {}
        self.retried = 0
        self._count = itertools.count()

    def introduce(self, decode: Remote) -> None:
        """Introduce a decode worker and every prefill worker to each other."""
        for prefill in self.prefills:
            introduce(prefill, decode)

    def submit(self, prompt: list[int]) -> None:
        self._start({"id": new_request_id().hex(), "attempt": 0, "prompt": prompt, "output": 4})

    def _start(self, request: dict[str, Any]) -> None:
        number = next(self._count)
        prefill = self.prefills[number % len(self.prefills)]
        decode = self.decodes[number // len(self.prefills) % len(self.decodes)]
        self.open[request["id"]] = request, decode
        prefill.send(do="prefill", peer=decode.name, **request)
        decode.send(do="decode", peer=prefill.name, **request)

    def collect(self) -> int:
        """Take the answers of all open requests, retry failed ones, and return the number of answers."""
        count = 0
        while self.open:
            _, decode = next(iter(self.open.values()))
            answer = decode.answer()
            request, _ = self.open.pop(answer["id"])
            if "error" in answer:
                self.retried += 1
                self._start({**request, "attempt": request["attempt"] + 1})
            elif answer["tokens"] != generate(request["prompt"], request["output"]):
                sys.exit(f"wrong answer: {answer}")
            else:
                count += 1
        return count


def prompts(count: int) -> list[list[int]]:
    return [[(number * 13 + i * 7) % 32000 for i in range(17 + 11 * number)] for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", help="engine of all workers")
    backend, begun = parser.parse_args().backend, time.monotonic()
    with ExitStack() as opened:
        router = Router()

        def start(role: str, number: int) -> Remote:
            environ = {"DISAGG_BACKEND": backend, "DISAGG_NAME": f"{role}-{number}"}
            return opened.enter_context(started(role, environ=environ))

        router.prefills = [start("prefill", number) for number in range(2)]
        router.decodes = [start("decode", number) for number in range(2)]
        for worker in (*router.prefills, *router.decodes):
            worker.wait_started()
        for decode in router.decodes:
            router.introduce(decode)
        for prompt in prompts(8):
            router.submit(prompt)
        third = start("decode", 2)
        print(f"2 prefill, 2 decode workers: {router.collect()} answers")

        third.wait_started()
        router.introduce(third)
        router.decodes.append(third)
        for prompt in prompts(6):
            router.submit(prompt)
        print(f"a third decode worker joined: {router.collect()} answers")

        victim = router.prefills[0]
        victim.process.kill()
        for prompt in prompts(6):
            router.submit(prompt)
        router.prefills.remove(victim)
        print(f"a prefill worker was killed: {router.collect()} answers, {router.retried} after another attempt")
    print(f"every token as expected, {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()

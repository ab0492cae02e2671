"""Conversations with SGLang's servers over HTTP.

SGLang's decode server computes no prompt, so every turn is asked at both servers at once, and a hand-over that fails is a
refused request. Aborts are requests of SGLang's own API.

Decode keeps every request that it can, and prefill is given one of those with each of its own: mostly of another turn of the
same conversation, or of another one.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.ports import free_ports
from harness.servers import NO_OVERLAP, Server
from harness.turns.answers import NUM_LOGPROBS, TOLERANCE, Answer
from harness.turns.conversation import Habits, Prompt, Turn, Way
from harness.turns.servers import Case
from harness.vllm.models import write_model

WAYS = {
    Way.BOTH_AT_ONCE: 84,
    Way.DEAD_ADDRESS: 1,
    Way.ABORTED_ON_PREFILL: 5,
    Way.ABORTED_WHILE_LOADING: 5,
    Way.ABORTED_WHILE_ANSWERING: 5,
}
FIRST_ROOM = 2**60
NO_ANSWER = "no answer in time"
RETRACTED = "retracted on decode"
TIMEOUT_S = 90.0
"""A request without a prefill server takes SGLang about 30 s."""


@dataclass(frozen=True, kw_only=True)
class SglangCase(Case):
    """`prefill`, `decode` and `undivided` are options of SGLang's command line. The undivided server has pages of one token.
    `environ` are environment variables of all servers.
    """

    model: str
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    undivided: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


RADIX_CACHE = "--disaggregation-decode-enable-radix-cache"
SLOTS = ("--max-mamba-cache-size", "64")
"""Otherwise as many as the machine's free memory holds."""
SMALL = ("--max-total-tokens", "2048")
DATA_PARALLEL = ("--tp", "2", "--dp", "2", "--enable-dp-attention", "--enable-dp-lm-head")
"""Otherwise ranks exchange logits of batches of one size with an operator that only GPUs have, and the server ends."""

CASES = {
    "mistral": SglangCase(
        model="mistral",
        habits=Habits(ways=WAYS, unit=16),
        tolerance=TOLERANCE,
        prefill=("--page-size", "16", "--chunked-prefill-size", "256", *SMALL),
        decode=("--page-size", "64", *SMALL),  # with a cache it needs all tokens, whatever the window is
    ),
    "llama": SglangCase(
        model="llama",
        habits=Habits(ways=WAYS, unit=16),
        tolerance=TOLERANCE,
        prefill=("--page-size", "64", "--chunked-prefill-size", "256", *SMALL),
        decode=("--tp", "2", "--page-size", "16", RADIX_CACHE, *SMALL),
    ),
    "llama-retracted": SglangCase(
        model="llama",
        habits=Habits(ways=WAYS, unit=16, longest=160, long_answers=0.6, most_at_once=6),
        tolerance=TOLERANCE,
        reached=(RETRACTED,),
        prefill=("--page-size", "64", "--chunked-prefill-size", "256", *SMALL),
        decode=("--page-size", "16", "--max-total-tokens", "384", "--num-reserved-decode-tokens", "1"),
    ),
    "gemma3": SglangCase(
        model="gemma3",
        habits=Habits(ways=WAYS, unit=16),
        tolerance=TOLERANCE,
        prefill=("--page-size", "16", "--chunked-prefill-size", "256"),
        decode=("--page-size", "64"),
    ),
    "qwen3-next": SglangCase(
        model="qwen3-next",
        habits=Habits(ways=WAYS, unit=16),
        tolerance=TOLERANCE,
        prefill=("--tp", "2", "--chunked-prefill-size", "256", *SLOTS, *SMALL),
        decode=("--page-size", "64", NO_OVERLAP, *SLOTS, *SMALL),
        undivided=(NO_OVERLAP,),
        environ={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
    "qwen3-next-retracted": SglangCase(
        model="qwen3-next",
        habits=Habits(ways=WAYS, unit=16, longest=160, long_answers=0.6, most_at_once=6),
        tolerance=TOLERANCE,
        reached=(RETRACTED,),
        prefill=("--chunked-prefill-size", "256", *SLOTS, *SMALL),
        # With a cache, and with overlap or pages of several tokens, SGLang needs a GPU.
        decode=("--disable-radix-cache", "--max-total-tokens", "384", "--num-reserved-decode-tokens", "1", *SLOTS),
        undivided=(NO_OVERLAP,),
        environ={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
    "qwen3-next-cached": SglangCase(
        model="qwen3-next",
        habits=Habits(ways=WAYS, unit=16),
        tolerance=TOLERANCE,
        prefill=("--tp", "2", "--chunked-prefill-size", "256", *SLOTS, *SMALL),
        # The other strategy needs a GPU.
        decode=("--mamba-radix-cache-strategy", "no_buffer", RADIX_CACHE, NO_OVERLAP, *SLOTS, *SMALL),
        undivided=(NO_OVERLAP,),
        environ={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
    "llama-stages": SglangCase(
        model="llama",
        habits=Habits(ways=WAYS, unit=16),
        tolerance=TOLERANCE,
        prefill=("--pp-size", "2", "--page-size", "16", "--chunked-prefill-size", "256", *SMALL),
        decode=("--page-size", "64", *SMALL),
    ),
    "qwen3-data-parallel": SglangCase(
        model="qwen3",
        habits=Habits(ways=WAYS, unit=16),
        tolerance=TOLERANCE,
        prefill=(*DATA_PARALLEL, "--page-size", "16", "--chunked-prefill-size", "256", *SMALL),
        decode=(*DATA_PARALLEL, "--page-size", "64", *SMALL),
    ),
}


class SglangServers:
    """Three servers of a case."""

    def __init__(self, case: SglangCase, folder: Path, stack: ExitStack) -> None:
        self.case = case
        model = write_model(case.model, folder / case.model)

        def start(*options: str, mode: str | None = None) -> Server:
            return stack.enter_context(Server.sglang(model, *options, mode=mode, instead_of=None, **case.environ))

        self._pool = stack.enter_context(ThreadPoolExecutor(32))  # first, so that servers end before it waits for requests
        self._prefill = start(*case.prefill, mode="prefill")
        self._decode = start(*case.decode, "--enable-metrics", mode="decode")
        self._alone = start(*case.undivided)
        self._servers = {"prefill": self._prefill, "decode": self._decode, "the undivided server": self._alone}
        for server in self._servers.values():
            server.wait_ready()
        (self._dead_port,) = free_ports(1)
        self._num_rooms = 0
        self._kept: list[Mapping[str, Any]] = []
        self._reasons: dict[int, str] = {}

    def alone(self, turns: Sequence[Turn]) -> list[Answer]:
        asked = [self._pool.submit(_generate, self._alone, turn.prompt, turn.max_tokens) for turn in turns]
        answers = [each.result() for each in asked]
        if wrong := [each for each in answers if isinstance(each, str)]:
            raise RuntimeError(f"the undivided server answers {wrong[0]}")
        return [each for each in answers if isinstance(each, Answer)]

    def divided(self, turns: Sequence[Turn]) -> list[Answer | None]:
        """Prompts go to both servers at once. SGLang's router chooses a room for each, where the servers meet."""
        found = [self._pool.submit(self._ask, turn, self._num_rooms + at, self._taken(turn)) for at, turn in enumerate(turns)]
        self._num_rooms += len(turns)
        answers = []
        for turn, each in zip(turns, found, strict=True):
            answer = each.result()
            self._reasons[turn.number] = answer if isinstance(answer, str) else ""
            answers.append(answer if isinstance(answer, Answer) else None)
        rooms = range(self._num_rooms - len(turns), self._num_rooms)
        self._kept += [each for each in self._pool.map(self._kept_of, rooms) if each is not None]
        return answers

    def _kept_of(self, number: int) -> Mapping[str, Any] | None:
        asked = {"sampling_params": {"max_new_tokens": 1, "custom_params": {"disagg_kept_request_id": f"{number:032x}"}}}
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1 + number}
        (found,) = _post(self._decode, {"input_ids": [0], **asked, **room})["meta_info"]["disagg_kept"]
        return found  # type: ignore[no-any-return]

    def _taken(self, turn: Turn) -> dict[str, Any]:
        """What prefill is told to take."""
        return {"disagg_kept": self._kept.pop(-1 - turn.number % min(3, len(self._kept)))} if self._kept else {}

    def _ask(self, turn: Turn, number: int, taken: Mapping[str, Any]) -> Answer | str:
        """Decode's answer, or the reason why there is none."""
        way, wanted, room = turn.way, turn.max_tokens, FIRST_ROOM + number
        port = self._dead_port if way is Way.DEAD_ADDRESS else self._prefill.bootstrap_port
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room, "rid": f"room-{room}"}
        asked: list[Future[Answer | str]] = []
        if way is not Way.DEAD_ADDRESS:
            asked.append(self._pool.submit(_generate, self._prefill, turn.prefilled, wanted, told=taken, **where))
        if way is Way.ABORTED_ON_PREFILL:
            time.sleep(turn.number % 4 * 0.01)
            return _aborted(self._prefill, f"room-{room}", asked[0])
        more = 40 if way.is_aborted else 0
        keep = {"disagg_keep": f"{number:032x}"}
        decoded = self._pool.submit(_generate, self._decode, turn.prompt, wanted + more, told=keep, **where)
        if way is Way.ABORTED_WHILE_LOADING:
            time.sleep(turn.number % 4 * 0.01)
        elif way is Way.ABORTED_WHILE_ANSWERING:
            asked[0].result()
        answer = _aborted(self._decode, f"room-{room}", decoded) if way.is_aborted else decoded.result()
        for each in asked:
            each.result()
        return answer

    def problem(self, turn: Turn, _: Answer) -> str:
        return "" if turn.way is not Way.DEAD_ADDRESS else "expected no answer without a prefill server"

    def refusal(self, turn: Turn) -> str:
        """A hand-over that is of another prompt, or cannot be, is refused, and no other."""
        reason = self._reasons[turn.number]
        expected = (turn.way is Way.DEAD_ADDRESS or turn.is_mistaken) and reason != NO_ANSWER
        return "" if expected else f"expected an answer, found {reason}"

    def end(self) -> str:
        """SGLang refuses to empty its cache while it has requests, and ends if a page is missing then."""
        problems = []
        for name, server in self._servers.items():
            try:
                server.flush()
                server.wait_ready(timeout_s=10)
            except (urllib.error.URLError, RuntimeError) as error:
                problems.append(f"{name} cannot empty its cache: {error}")
        return "; ".join(problems)

    def counts(self) -> Mapping[str, float]:
        try:
            return {RETRACTED: self._decode.metric("sglang:num_retracted_requests_total")}
        except KeyError:  # SGLang shows the counter with its first count
            return {RETRACTED: 0.0}


def _aborted(server: Server, request: str, answer: Future[Answer | str]) -> Answer | str:
    """Abort a request, again until it ends: an abort that comes before its request has no effect."""
    while not answer.done():
        server.abort(request)
        wait([answer], timeout=0.1)
    return answer.result()


def _post(server: Server, body: Mapping[str, Any]) -> Any:
    """Raises `RuntimeError` with the end of the log of a server that has ended."""
    request = urllib.request.Request(
        f"{server.url}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except http.client.RemoteDisconnected as error:
        raise RuntimeError(f"{server.url} has ended: {server.log()}") from error


def _generate(
    server: Server, prompt: Prompt, max_tokens: int, *, told: Mapping[str, Any] | None = None, **fields: Any
) -> Answer | str:
    """A greedy answer, or the server's reason for none."""
    params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    body = {
        "input_ids": list(prompt.tokens),
        "sampling_params": {**params, "custom_params": told} if told else params,
        "return_logprob": True,
        "top_logprobs_num": NUM_LOGPROBS,
        **fields,
    }
    try:
        found = _post(server, body)
    except TimeoutError:
        return NO_ANSWER
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()[:300]}"
    about = found["meta_info"]
    if about["finish_reason"]["type"] == "abort":
        return str(about["finish_reason"])
    chosen, likely = about["output_token_logprobs"], about["output_top_logprobs"]
    logprobs = [
        {int(token): float(logprob) for logprob, token, _ in (one, *others)} for one, others in zip(chosen, likely, strict=True)
    ]
    return Answer(found["output_ids"], logprobs)


def missing(_: SglangCase) -> str:
    """What a machine lacks for a case: nothing."""
    return ""


def start(case: SglangCase, folder: Path, stack: ExitStack) -> SglangServers:
    """Start the servers of a case, which are stopped with `stack`."""
    return SglangServers(case, folder, stack)

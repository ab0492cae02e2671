"""SGLang ranks as processes: the transfer backend's classes, driven as SGLang's scheduler drives them, over memory in NumPy.

Everything of SGLang is real but the scheduler, its process groups and the model: each rank is told what to do through a pipe.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import requests
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode

from disagg import ModelId, Topology
from disagg.core.errors import LocalProtocolError
from disagg.integrations.sglang.host import Host
from disagg.integrations.sglang.manager import DisaggKVManager
from disagg.integrations.sglang.payload import check_metadata
from disagg.integrations.sglang.prompts import Prompt
from disagg.integrations.sglang.receiver import DisaggKVReceiver
from disagg.integrations.sglang.sender import DisaggKVSender
from tests.integrations.sglang.memory import Array, Memory, Model, Request

HOST = "127.0.0.1"
NUM_AUX = 16
STEP_S = 1e-3
"""The pause between two iterations of the scheduler, while it has requests."""
LOOK_EVERY_S = 1.0
"""How often SGLang's decode looks whether an instance is known."""


class FileGroup:
    """A process group whose ranks exchange objects through files."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)

    def all_gather_object(self, own: Any) -> list[Any]:
        number = next(self._numbers)
        paths = [self.folder / f"{number}-{rank}" for rank in range(self.size)]
        part = paths[self.rank].with_suffix(".part")
        part.write_bytes(pickle.dumps(own))
        part.rename(paths[self.rank])
        while not all(path.exists() for path in paths):
            time.sleep(0.005)
        return [pickle.loads(path.read_bytes()) for path in paths]

    def broadcast_object(self, own: Any, src: int = 0) -> Any:
        return self.all_gather_object(own)[src]


class HostEvent:
    """What SGLang records on a stream: it passes when the step before this one has written its pages."""

    def __init__(self) -> None:
        self.num_queries, self.has_passed = 0, False

    def query(self) -> bool:
        self.num_queries += 1
        return self.has_passed

    def synchronize(self) -> None:
        raise AssertionError("expected a query, since waiting would stop the transfers of other requests")


@dataclass
class Started:
    """One request on a rank: what the scheduler keeps of it."""

    room: int
    request: Request
    seed: int
    salt: str = ""
    sender: Any = None
    receiver: Any = None
    chunks: list[int] = field(default_factory=list)
    held: bool = False
    aux: int = 0
    is_begun: bool = False
    is_found: bool = False
    look_at: float = 0.0
    has_pages: bool = True
    next_token: int = 0
    event: HostEvent | None = None
    sent_s: float = 0.0


def prompt_of(started: Started) -> Prompt:
    return Prompt(token_ids=range(started.request.num_tokens), salt=started.salt)


class RankProcess:
    """Runs in the child: a scheduler's loop for one rank. Another backend's has classes and a `build` of its own."""

    sender, receiver = DisaggKVSender, DisaggKVReceiver

    def __init__(
        self, role: str, model: Model, topology: Topology, *, folder: Path, bootstrap_port: int, page_size: int
    ) -> None:
        self.role, self.topology, self.folder, self.bootstrap = role, topology, folder, f"{HOST}:{bootstrap_port}"
        self.memory = Memory(model, topology, page_size=page_size, num_pages=4096 // page_size)
        self.aux: list[Array] = [np.zeros((NUM_AUX, 16), np.int32), np.zeros((NUM_AUX, 8), np.uint64)]
        self.free_aux = list(range(NUM_AUX))
        self.started: dict[int, Started] = {}
        self.releasing: dict[int, Started] = {}
        self.has_new_scales = False
        self.running: HostEvent | None = None
        """What a GPU computes: it may still write pages that the scheduler has freed."""
        _replace_context(topology, folder / role, bootstrap_port)
        mode = DisaggregationMode.PREFILL if role == "prefill" else DisaggregationMode.DECODE
        if role == "prefill" and topology.rank == 0:
            self.server = conn.CommonKVBootstrapServer(HOST, bootstrap_port)
        self.manager = self.build(mode)

    def build(self, mode: DisaggregationMode) -> Any:
        topology = self.topology
        stage = FileGroup(self.folder / f"{self.role}-stages-{_pipeline(topology)}", topology.pp_rank, topology.pp)
        world = FileGroup(self.folder / f"{self.role}-world", topology.rank, topology.num_ranks)
        DisaggKVManager.host = Host(
            model=ModelId("test"),
            read_facts=lambda _: self.memory.facts(),
            gather=stage.all_gather_object,
            from_leader=world.broadcast_object,
            request=lambda receiver: self.started[receiver.bootstrap_room],
            prompt=prompt_of,
            write_first_token=self._write_first_token,
            check_metadata=self._check_metadata,
            check_scales=self._check_scales,
            launched=lambda: self.running,
        )
        storage = dict.fromkeys(("hicache_storage_backend", "enable_unified_cache_external_linker", "enable_lmcache"))
        options = SimpleNamespace(log_requests=False, **storage)
        return DisaggKVManager(self.kv_args(), mode, options, self.memory.model.heads is None)

    def kv_args(self) -> SimpleNamespace:
        return self.memory.kv_args(
            aux_data_ptrs=[a.ctypes.data for a in self.aux],
            aux_data_lens=[a.nbytes for a in self.aux],
            aux_item_lens=[a[0].nbytes for a in self.aux],
            engine_rank=self.topology.tp_rank, pp_rank=self.topology.pp_rank, system_dp_rank=0, rust_http_port=None,
            kv_cache_dtype_str="float32", kv_layout=None, kv_layer_ids=[], swa_kv_cache_layout=None, gpu_id=0, ib_device=None,
        )  # fmt: skip

    def _write_first_token(self, index: int, token: int, room: int) -> None:
        self.aux[0][index, 0], self.aux[1][index, 0] = token, room

    def _check_metadata(self, index: int, room: int) -> None:
        ids, rooms = self.aux
        names = ("output_ids", "output_token_logprobs_idx", "output_top_logprobs_idx", "output_topk_index")
        rows = SimpleNamespace(bootstrap_room=rooms, output_token_sampling_mask_idx=None, **dict.fromkeys(names, ids))
        check_metadata(rows, index, room=room, vocabulary=2000)

    def _check_scales(self) -> None:
        if self.has_new_scales:
            raise LocalProtocolError("scales of K and V: expected those of the start")

    def load_scales(self) -> bool:
        """As if new weights had brought other scales of K and V."""
        self.has_new_scales = True
        return True

    def launch(self) -> bool:
        """Let a step of the GPU run until `end_step`."""
        self.running = HostEvent()
        return True

    def end_step(self) -> bool:
        assert self.running is not None
        self.running.has_passed = True
        return True

    def step(self, say: Callable[..., None]) -> None:
        """One iteration of the scheduler."""
        for started in list(self.started.values()):
            try:
                self._prefill(started, say) if self.role == "prefill" else self._decode(started, say)
            except Exception as error:  # noqa: BLE001  told to the test
                say(room=started.room, status="error", reason=f"{error!r} {traceback.format_exc()}")
                self.started.pop(started.room, None)
        for room in list(self.releasing):
            if self.manager.is_abort_release_safe(room, 1):
                self.manager.clear_deferred_abort_state(room)
                self.free_aux.append(self.releasing.pop(room).aux)
                say(room=room, released=True)

    def switch(self, bootstrap_port: int) -> str:
        """Take the other role, as an idle server of SGLang does: the manager is torn down, and another is built."""
        self.manager.teardown()
        self.role = "decode" if self.role == "prefill" else "prefill"
        self.folder, self.bootstrap = self.folder / str(bootstrap_port), f"{HOST}:{bootstrap_port}"
        _replace_context(self.topology, self.folder / self.role, bootstrap_port)
        if self.role == "prefill" and self.topology.rank == 0:
            self.server = conn.CommonKVBootstrapServer(HOST, bootstrap_port)
        self.manager = self.build(DisaggregationMode(self.role))
        return str(self.manager.leader)

    # -- prefill -----------------------------------------------------------------------------------------------------

    def prefill(
        self,
        room: int,
        request: Request,
        seed: int,
        *,
        chunks: tuple[int, ...] = (),
        held: bool = False,
        early: bool = False,
        salt: str = "",
    ) -> None:
        """Serve a room. It is sent up to each token of `chunks`, then to the end; `held`: not until `go`.

        `early`: the first chunk is sent before it is computed, with an event, and the others after `compute`.
        """
        sender = self.sender(self.manager, self.bootstrap, room)
        started = Started(room, request, seed, salt, sender=sender, chunks=[*chunks, request.num_tokens], held=held)
        sender.prompt = prompt_of(started)
        started.event = HostEvent() if early else None
        self.started[room] = started

    def go(self, room: int) -> None:
        self.started[room].held = False

    def compute(self, room: int) -> None:
        """Write the state of a request that was sent early. Its event passes."""
        started = self.started[room]
        self.memory.fill(started.request, started.seed)
        assert started.event is not None
        started.event.has_passed, started.held = True, False

    def num_queries(self, room: int) -> int:
        """How often the event of a request was asked for."""
        event = self.started[room].event
        return 0 if event is None else event.num_queries

    def _prefill(self, started: Started, say: Callable[..., None]) -> None:
        sender, request = started.sender, started.request
        poll = sender.poll()
        if poll == KVPoll.WaitingForInput and not started.is_begun:
            started.is_begun, reserved_s = True, time.monotonic()
            started.next_token = request.prefix = sender.pop_decode_prefix_len()
            started.aux = self.free_aux.pop()
            size = self.memory.page_size
            sender.init(-(-(request.num_tokens - request.prefix) // size), started.aux)
            started.chunks = [stop for stop in started.chunks if stop > request.prefix or stop == request.num_tokens]
            if started.event is None:
                self.memory.fill(request, started.seed)
            say(room=started.room, status="reserved", prefix=request.prefix, reserved_s=reserved_s)
        if started.is_begun and not started.held and started.chunks:
            self._send(started, started.chunks.pop(0))
        if poll in (KVPoll.Success, KVPoll.Failed):
            self._end(started, poll, say)

    def _send(self, started: Started, stop: int) -> None:
        """Send up to token `stop`; a chunk that is not the last ends with a whole page, as SGLang's do."""
        sender, request, size = started.sender, started.request, self.memory.page_size
        last = not started.chunks
        stop = stop if last else stop // size * size
        if stop < started.next_token:
            return  # as SGLang's scheduler, also for the last chunk
        start, started.next_token = started.next_token, stop
        started.sent_s = started.sent_s or time.monotonic()
        if started.event is not None and not started.event.has_passed:
            sender._early_send_wait_event, started.held = started.event, True
        if last:
            self.aux[0][started.aux] = np.arange(16) + started.seed
            self.aux[1][started.aux, 0] = started.room
        pages = self.memory.kv_list(request, start, stop)
        if sender.should_send_kv_chunk(len(pages), last):
            sender.send(pages, self.memory.state_lists(request) if last else None, num_kv_tokens=stop - start)

    # -- decode ------------------------------------------------------------------------------------------------------

    def decode(
        self,
        room: int,
        request: Request,
        seed: int,
        *,
        group: int = 0,
        held: bool = False,
        has_pages: bool = True,
        bootstrap: str | None = None,
    ) -> None:
        """Receive a room from the instance at `bootstrap`. `held`: it is not looked for yet. Without `has_pages` it
        waits for `allocate`.
        """
        receiver = self.receiver(self.manager, bootstrap or self.bootstrap, room)
        self.started[room] = Started(room, request, seed, receiver=receiver, aux=group, held=held, has_pages=has_pages)

    def allocate(self, room: int) -> None:
        self.started[room].has_pages = True

    def _decode(self, started: Started, say: Callable[..., None]) -> None:
        receiver, request = started.receiver, started.request
        may_look = not started.held and receiver.conclude_state is None and time.monotonic() >= started.look_at
        if not started.is_found and may_look:
            started.look_at = time.monotonic() + LOOK_EVERY_S
            started.is_found = self.manager.try_ensure_parallel_info(receiver.bootstrap_addr)
            if started.is_found:
                receiver.init(started.aux)
                say(room=started.room, found=True)
        poll = receiver.poll()
        if poll == KVPoll.WaitingForInput and not started.is_begun and started.has_pages:
            started.is_begun = True
            started.aux = self.free_aux.pop()
            pages = self.memory.kv_list(request, request.prefix, request.num_tokens)
            receiver.send_metadata(pages, started.aux, self.memory.state_lists(request), decode_prefix_len=request.prefix)
        if poll == KVPoll.Success and not self.aux[1][started.aux, 0]:
            return  # SGLang's gate: metadata are not written yet
        if poll in (KVPoll.Success, KVPoll.Failed):
            self._end(started, poll, say)

    def again(self, room: int, *, abort: bool) -> str:
        """Open a room that is open, as SGLang does for each sample of a request. Returns why that fails at once."""
        if self.role == "prefill":
            either = self.sender(self.manager, self.bootstrap, room)
        else:
            either = self.receiver(self.manager, self.bootstrap, room)
            either.init(0)
        polls = [either.poll()]
        if abort:
            either.abort()
        polls.append(either.poll())
        try:
            either.failure_exception()
        except conn.KVTransferError as error:
            either.clear()
            return f"{[int(poll) for poll in polls]} {error.failure_reason}"
        raise AssertionError

    def keep_alive(self) -> int:
        """Keep an idle HTTP connection to the bootstrap server, as SGLang does. Returns the status of its answer."""
        self.session = requests.Session()
        return self.session.get(f"http://{self.bootstrap}/health").status_code

    def look_up(self) -> bool:
        """Learn of the instance that is at the bootstrap server now."""
        self.manager.prefill_info_table.pop(self.bootstrap, None)
        while not self.manager.try_ensure_parallel_info(self.bootstrap):
            time.sleep(STEP_S)
        return True

    def notice_end(self) -> bool:
        """Wait until the manager knows that an instance has ended."""
        names = [prefill.name for served in self.manager._served.values() for prefill in served.prefills.values()]
        while all(self.manager.transfers.peer(name).state == "ready" for name in names):
            time.sleep(STEP_S)
        return True

    def lookups(self) -> list[bool]:
        """Of the bootstrap servers that were asked, and nobody has come for their answers: whether they have answered."""
        return [answer.done() for answer in self.manager.bootstrap._asked.values()]

    def drop(self, room: int) -> None:
        """Abort a request and forget it, as SGLang does with those that wait for a batch on prefill."""
        started = self.started.pop(room)
        started.sender.abort()
        self.free_aux.append(started.aux)

    # -- ends --------------------------------------------------------------------------------------------------------

    def abort(self, room: int) -> None:
        started = self.started[room]
        (started.sender or started.receiver).abort()

    def _end(self, started: Started, poll: int, say: Callable[..., None]) -> None:
        either, reason, differences = started.sender or started.receiver, "", []
        times = {"sent_s": started.sent_s, "ended_s": time.monotonic()}
        if started.sender is not None:
            times["size"] = started.sender.get_transfer_metric().transfer_total_bytes
        if poll == KVPoll.Failed:
            try:
                either.failure_exception()
            except conn.KVTransferError as error:
                reason = error.failure_reason
        elif started.receiver is not None:
            differences = self.memory.differences(started.request, started.seed)
            if self.aux[0][started.aux].tolist() != list(range(started.seed, started.seed + 16)):
                differences.append("metadata")
        del self.started[started.room]
        self.aux[1][started.aux] = 0
        if poll == KVPoll.Failed and started.receiver is not None:
            either.ensure_abort_notified(force_arm=True)
            if either.abort_notified:
                self.releasing[started.room] = started
        either.clear()
        if started.is_begun and started.room not in self.releasing:
            self.free_aux.append(started.aux)
        status = "ok" if poll == KVPoll.Success else "failed"
        say(room=started.room, status=status, reason=reason, differences=differences, **times)

    def nbytes(self) -> int:
        """The bytes that this rank has written to others."""
        return int(self.manager.transfers.stats.nbytes)

    def idle(self) -> dict[str, Any]:
        """What is left over: empty when nothing is open."""
        manager = self.manager
        tables = {
            "rooms": range(len(manager.rooms)), "waiting": manager.waiting, "held": manager.held,
            "failures": manager.failure_records, "open": self.started,
            "status": getattr(manager.request_status, "_local_map", manager.request_status),
        }  # fmt: skip
        left: dict[str, Any] = {name: list(table) for name, table in tables.items() if table}
        if len(self.free_aux) != NUM_AUX:
            left["aux"] = len(self.free_aux)
        return left


def _pipeline(topology: Topology) -> str:
    """The ranks that differ from this one by their stage only."""
    return f"{topology.dp_rank}-{topology.cp_rank}-{topology.tp_rank}"


def _replace_context(topology: Topology, folder: Path, bootstrap_port: int) -> None:
    """What SGLang's modules ask of the process: its parallel sizes and its arguments."""
    parallel = SimpleNamespace(
        attn_tp_size=topology.tp, attn_tp_rank=topology.tp_rank, attn_cp_size=topology.cp, attn_cp_rank=topology.cp_rank,
        attn_dcp_size=1, attn_dcp_rank=0,
        attn_dp_size=topology.dp, attn_dp_rank=topology.dp_rank, num_dp_ranks=topology.dp, dp_size=1, pp_size=topology.pp,
        pp_group=FileGroup(folder / f"pp-{_pipeline(topology)}", topology.pp_rank, topology.pp),
        enable_kv_cache_sharding=False, enable_dsa_cache_layer_split=False, enable_cp_tp_group_sharing=False,
        dist_init_addr=None, nnodes=1, load_balance_method="follow_bootstrap_room",
    )  # fmt: skip
    conn.get_parallel = lambda: parallel
    conn.linear_attn_tp_size = lambda: topology.tp
    conn.get_serving = lambda: SimpleNamespace(host=HOST, port=0)
    conn.get_observability = lambda: SimpleNamespace(enable_trace=False)
    conn.get_disagg = lambda: SimpleNamespace(
        disaggregation_bootstrap_port=bootstrap_port, disaggregation_decode_allocation_policy="early"
    )


def _run(pipe: Connection, log: Path, environ: dict[str, str], kind: type[RankProcess], **arguments: Any) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
    rank = kind(**arguments)
    pipe.send({"ready": getattr(rank.manager, "leader", "")})
    while True:
        while pipe.poll(STEP_S if rank.started or rank.releasing else None):
            name, args, kwargs = pipe.recv()
            answer = getattr(rank, name)(*args, **kwargs)
            if answer is not None:
                pipe.send({name: answer})
        rank.step(lambda **found: pipe.send(found))


class Rank:
    """A rank process, as the test sees it."""

    def __init__(self, role: str, model: Model, topology: Topology, *, folder: Path, bootstrap_port: int, page_size: int,
                 environ: dict[str, str], log: str, kind: type[RankProcess]) -> None:  # fmt: skip
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        folder.mkdir(parents=True, exist_ok=True)
        self.role, self.topology, self.log = role, topology, folder / log
        arguments = {"role": role, "model": model, "topology": topology, "folder": folder, "bootstrap_port": bootstrap_port,
                     "page_size": page_size}  # fmt: skip
        self.process = context.Process(target=_run, args=(theirs, self.log, environ, kind), kwargs=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.heard: list[dict[str, Any]] = []
        self.num_given = self.num_pages_given = 0

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.pipe.send((name, args, kwargs))

    def ask(self, name: str, *args: Any) -> Any:
        """What a method answers."""
        self.call(name, *args)
        wanted: dict[str, Any] = {name: ...}
        return self.wait(**wanted)[name]

    def wait(self, timeout_s: float = 30.0, **wanted: Any) -> dict[str, Any]:
        """The first message that was not taken yet with these values (`...`: any value)."""
        until = time.monotonic() + timeout_s
        while True:
            for message in self.heard:
                if all(key in message and value in (..., message[key]) for key, value in wanted.items()):
                    self.heard.remove(message)
                    return message
            if not self.pipe.poll(max(0.0, until - time.monotonic())):
                raise TimeoutError(
                    f"{self.role} {self.topology}: no {wanted} in {timeout_s} s, heard {self.heard}\n{self.tail()}"
                )
            try:
                self.heard.append(self.pipe.recv())
            except EOFError:
                raise AssertionError(f"{self.role} {self.topology} has ended\n{self.tail()}") from None

    def tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-30:])

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

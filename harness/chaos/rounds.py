"""The kinds of rounds: what is done to ranks under load, and what must hold afterwards.

Each function is one round. It ends the fault that it began, waits until all ranks are connected again, and returns. What ranks
find themselves (wrong bytes, dead threads) is in the report, whatever the kind.
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from disagg.core.address import parse_address
from harness.chaos.controller import Chaos
from harness.chaos.places import OTHER_USER, Place
from harness.chaos.processes import RankProcess

CONTEST_S = 2.0
DISORDER_S = ALIAS_S = 3.0
NOTICED_S = 1.0
"""A rank that was stopped for about as long as the silence limit is given up while it goes on. Its peers notice within this."""
BROKEN_S = 3.0
"""Within this, requests between all ranks have shown which connections are broken."""
NUM_ABSENT = 1498
"""Peers that do not exist, beside the two that do."""
LOADED_S, IDLE_S = 10.0, 5.0
"""How long a rank with many peers serves requests, and how long its CPU time is then measured without any."""


@dataclass(frozen=True)
class Kind:
    """A kind of round. `hosts`: on how many hosts it can run. `weight`: how often it is chosen. `needs_places`: it needs what
    `places.missing_for_places` checks, `needs_resets` what `missing_for_resets` checks. `needs_link`: it needs RDMA devices on
    a link, which `--transport rdma` makes. `may_quarantine`: as in the report; a run has such a kind only if it is asked for.
    `ends_ranks`: ranks are killed. What a rank on another host could write itself would stay quarantined, as no other host can
    prove that it has ended: between two hosts everything is packed in such a run.
    """

    run: Callable[[Chaos], None]
    weight: int
    hosts: tuple[int, ...] = (1,)
    needs_places: bool = False
    needs_resets: bool = False
    needs_link: bool = False
    may_quarantine: bool = False
    ends_ranks: bool = False


def kill(chaos: Chaos) -> None:
    """Kill a rank and restart it at once. In three of ten rounds one of its peers is stopped meanwhile, so that bytes stay in
    its sockets.
    """
    rng = chaos.rng
    chaos.wait(0.05 + rng.random() * 0.25)
    rank = rng.choice(chaos.live())
    stopped = rng.choice(chaos.opposite(rank)) if rng.random() < 0.3 else None
    if stopped is not None:
        stopped.stop()
        chaos.wait(rng.random() * 0.1)
    where = _replace(chaos, rank, "kill, a peer stopped" if stopped else "kill")
    if stopped is not None:
        chaos.wait(rng.random() * 0.3)
        stopped.go_on()
    chaos.heal("kill", f"{rank.name} killed, {where}")


def give_up(chaos: Chaos) -> None:
    """Kill a rank, and restart it after its peers have given it up."""
    rng = chaos.rng
    rank = rng.choice(chaos.live())
    began, address = time.monotonic(), chaos.kill(rank)
    noticed = chaos.states_satisfy(lambda state: rank.instance.name not in state["ready"], chaos.opposite(rank))
    if chaos.pump(noticed, chaos.silence_s + chaos.load.deadline_s, f"{rank.name} killed: its peers have not noticed"):
        chaos.note_time("give-up: noticed", time.monotonic() - began)
    chaos.wait(max(0.0, began + chaos.silence_s + 0.5 + rng.random() * 2 - time.monotonic()))
    losses = chaos.losses()
    where = _restart(chaos, rank, address, "give-up")
    what = f"{rank.name} killed, given up, {where}"
    chaos.heal("give-up", what)
    chaos.stays_healed(what, since=losses)


def stop(chaos: Chaos) -> None:
    """Stop a rank (SIGSTOP) for 1 to 20 s while its peers release and reuse their rows."""
    rank = chaos.rng.choice(chaos.live())
    _stop(chaos, rank, chaos.rng.uniform(1, chaos.longest(20)), "stop")


def cut(chaos: Chaos) -> None:
    """Cut the link between the hosts for 1 to 29 s: it goes down, or packets vanish."""
    assert chaos.hosts is not None
    silently = chaos.rng.random() < 0.5
    seconds = chaos.rng.uniform(1, chaos.longest(29))
    chaos.report.faults["cut: packets vanish" if silently else "cut: link down"] += 1
    chaos.hosts.cut(silently=silently)
    try:
        chaos.wait(seconds)
    finally:
        chaos.hosts.mend()
    what = f"a cut of {seconds:.1f} s"
    chaos.heal("cut", what)
    chaos.wait(chaos.silence_s)  # TCP may repeat its packets only after ranks that were still connected are given up
    chaos.heal("cut: afterwards", what)


def reset(chaos: Chaos, *, whole: bool) -> None:
    """Reset the control connections of a rank up to four times in a row; with `whole` all its TCP connections, also the
    engine's, which may cost rows.
    """
    rng, kind = chaos.rng, "reset: all" if whole else "reset"
    rank = rng.choice(chaos.live())
    chaos.report.faults[kind] += 1
    num_reset = 0
    for _ in range(rng.randrange(1, 5)):
        num_reset += rank.reset(None if whole else parse_address(rank.address, what=rank.name)[1])
        chaos.wait(rng.random() * 0.3)
    what = f"{num_reset} connections of {rank.name} were reset"
    chaos.heal(kind, what)
    if whole:  # a broken connection of the engine shows when something is posted
        chaos.wait(BROKEN_S)
        chaos.heal(f"{kind}: afterwards", what)
    chaos.stays_healed(what)
    chaos.receives_again(what)


def lose(chaos: Chaos) -> None:
    """Lose some of the RDMA packets for 1 to 10 s."""
    assert chaos.link is not None
    percent, seconds = chaos.rng.uniform(0.5, 5), chaos.rng.uniform(1, chaos.longest(10))
    chaos.report.faults["lose"] += 1
    chaos.link.lose(percent)
    chaos.wait(seconds)
    chaos.report.lost_packets += chaos.link.lost_packets
    chaos.link.mend()
    _judge_link(chaos, "lose", f"{percent:.1f}% of the packets were lost for {seconds:.1f} s")


def take_down(chaos: Chaos) -> None:
    """Take the RDMA device of all prefill or all decode ranks down for 1 to 10 s, and restart these ranks.

    No engine survives this: NIXL's ends the process, and Mooncake's takes no work for that device any more.
    """
    assert chaos.link is not None
    side, seconds = chaos.rng.randrange(2), chaos.rng.uniform(1, chaos.longest(10))
    users = [rank for rank in chaos.live() if rank.instance.prefills == (side == 0)]
    for rank in users:
        rank.may_end = True
    chaos.link.take_down(*chaos.link.side(side))
    chaos.wait(seconds)
    chaos.link.mend()
    for rank in users:
        _replace(chaos, rank, "down")
    _judge_link(chaos, "down", f"the devices of side {side} were down for {seconds:.1f} s")


def _judge_link(chaos: Chaos, kind: str, what: str) -> None:
    """Wait until all ranks are connected and a request succeeds."""
    chaos.heal(kind, what)
    chaos.receives_again(what)


def users(chaos: Chaos, *, hidepid: int) -> None:
    """Restart a rank as another user, with `/proc` mounted in that way. Then stop one of its peers until that rank has given it
    up, and let it continue.
    """
    rng, kind = chaos.rng, f"hidepid-{hidepid}" if hidepid else "users"
    rank = rng.choice(chaos.live())
    _replace(chaos, rank, kind, Place(user=OTHER_USER, hidepid=hidepid))
    chaos.heal(f"{kind}: restarted", f"{rank.name} restarted as user {OTHER_USER}")
    chaos.wait(0.5)
    _stop(chaos, rng.choice(chaos.opposite(rank)), chaos.silence_s + rng.uniform(1, 4), kind, counted=False)


def compete(chaos: Chaos) -> None:
    """Let two instances reserve the same requests, and one rank twice. Only the instance they were sent to may receive them,
    and whatever fails must fail in time, with a reason.
    """
    chaos.report.faults["compete"] += 1
    chaos.load.contest = 0.5
    chaos.wait(CONTEST_S)
    chaos.load.contest = 0.0
    began = time.monotonic()
    chaos.pump(lambda: not chaos.load.num_contested, chaos.load.deadline_s + chaos.load.grace_s + 1)
    chaos.note_time("compete: all ended", time.monotonic() - began)


def descriptors(chaos: Chaos) -> None:
    """Let a rank run out of descriptors for some seconds, in most rounds while one of its peers is killed and restarted."""
    rng = chaos.rng
    rank = rng.choice(
        [one for one in chaos.live() if one.place.user is None]
    )  # setting another user's limits takes more than root
    pid = rank.pid
    used = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()) + 1
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + rng.randrange(4), before[1]))
    if rng.random() < 0.7:
        _replace(chaos, rng.choice(chaos.opposite(rank)), "descriptors, a peer killed")
    else:
        chaos.report.faults["descriptors"] += 1
    chaos.wait(rng.uniform(2, 6))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    what = f"{rank.name} had no descriptors"
    chaos.heal("descriptors", what)
    chaos.stays_healed(what)


def many_peers(chaos: Chaos) -> None:
    """Configure many peers that do not exist on one rank. It must serve the two that do. Notes its CPU time without requests.

    Then it is killed and restarted, because peers cannot be removed.
    """
    rank = chaos.rng.choice(chaos.live())
    addresses = ("tcp://127.0.0.1:{}", "tcp://192.0.2.1:{}")  # one refuses, the other never answers
    rank.send({"op": "peers", "peers": {f"absent-{n}": addresses[n % 2].format(10000 + n) for n in range(NUM_ABSENT)}})
    began = time.monotonic()
    known = chaos.states_satisfy(lambda state: state["num_peers"] > NUM_ABSENT, [rank])
    chaos.pump(known, chaos.load.grace_s, f"{rank.name}: does not know its {NUM_ABSENT} absent peers")
    chaos.note_time("many-peers: known", time.monotonic() - began)
    received = chaos.load.received[rank]
    chaos.wait(LOADED_S)
    chaos.heal("many-peers", f"{rank.name} with {NUM_ABSENT} absent peers")
    if chaos.load.received[rank] == received:
        chaos.report.unhealed.append(f"{rank.name} with {NUM_ABSENT} absent peers received nothing in {LOADED_S} s")
    chaos.load.running = False
    chaos.pump(lambda: chaos.load.idle, chaos.load.deadline_s + chaos.load.grace_s)
    chaos.report.cpu.append(_cpu_share(chaos, rank))
    chaos.load.running = True
    where = _replace(chaos, rank, "many-peers")
    chaos.heal("many-peers: restarted", f"{rank.name} restarted, {where}")


def reopen(chaos: Chaos) -> None:
    """Let a rank close its manager and open another one in the same process, while one of its peers is stopped, which then goes
    on with what it was writing.
    """
    rng = chaos.rng
    rank = rng.choice(chaos.live())
    stopped = rng.choice(chaos.opposite(rank))
    chaos.report.faults["reopen"] += 1
    chaos.wait(rng.random() * 0.2)
    stopped.stop()
    chaos.wait(rng.random() * 0.3)
    chaos.reopen(rank)
    chaos.wait(rng.random())
    stopped.go_on()
    what = f"{rank.name} closed and opened while {stopped.name} was stopped"
    chaos.heal("reopen", what)
    chaos.receives_again(what)


def renew(chaos: Chaos) -> None:
    """Let a rank start its engine again, sometimes while a peer is stopped, which then goes on with what it was writing."""
    rng = chaos.rng
    rank = rng.choice(chaos.live())
    stopped = rng.choice([None, *chaos.opposite(rank)])
    chaos.report.faults["renew"] += 1
    chaos.wait(rng.random() * 0.2)
    if stopped is not None:
        stopped.stop()
        chaos.wait(rng.random() * 0.3)
    rank.send({"op": "renew"})
    chaos.wait(rng.random())
    if stopped is not None:
        stopped.go_on()
    what = f"{rank.name} started its engine again" + (f" while {stopped.name} was stopped" if stopped is not None else "")
    chaos.heal("renew", what)
    chaos.receives_again(what)


def alias(chaos: Chaos) -> None:
    """Configure a peer a second time on one rank, under another name. Requests by the right name must go on."""
    rng = chaos.rng
    rank = rng.choice(chaos.live())
    other = rng.choice([one for one in chaos.opposite(rank) if one.rank == 0])
    chaos.report.faults["alias"] += 1
    losses = chaos.losses()
    rank.send({"op": "peers", "peers": {"alias": other.address}})
    chaos.wait(ALIAS_S)
    what = f"{rank.name} knows {other.name} by two names"
    chaos.heal("alias", what)
    chaos.receives_again(what)
    rank.send({"op": "forget", "peer": "alias"})
    chaos.heal("alias: forgotten", what)
    chaos.stays_healed(what, since=losses)


def execute(chaos: Chaos) -> None:
    """Let a rank execute another program, which keeps its process and the engine's sockets, and start the rank again. Over NIXL
    the rows of peers that may see its program come back meanwhile, other rows with the end of the program.
    """
    rank = chaos.rng.choice(chaos.live())
    chaos.wait(0.05 + chaos.rng.random() * 0.25)
    began, address = time.monotonic(), chaos.leave(rank)
    try:
        noticed = chaos.states_satisfy(lambda state: rank.instance.name not in state["ready"], chaos.opposite(rank))
        if chaos.pump(noticed, chaos.silence_s + chaos.load.deadline_s, f"{rank.name} left: its peers have not noticed"):
            chaos.note_time("execute: noticed", time.monotonic() - began)
        where = _restart(chaos, rank, address, "execute")
        what = f"{rank.name} executes another program, {where}"
        chaos.heal("execute", what)
        seeing = [one for one in chaos.opposite(rank) if one.place.user is None]  # the kernel hides it from other users
        if chaos.report.engine == "nixl" and seeing:
            gone = f"{rank.name} is gone"
            back = chaos.states_satisfy(lambda state: not any(gone in reason for reason in state["reasons"]), seeing)
            if chaos.pump(back, chaos.load.grace_s, f"{what}: rows did not come back"):
                chaos.note_time("execute: rows back", time.monotonic() - began)
    finally:
        rank.end()


def disorder(chaos: Chaos) -> None:
    """Send requests in many chunks, in any order."""
    chaos.report.faults["disorder"] += 1
    chaos.load.disorder = True
    chaos.wait(DISORDER_S)
    chaos.load.disorder = False
    chaos.receives_again("requests in any order")


KINDS: Mapping[str, Kind] = {
    "kill": Kind(kill, 8, hosts=(1, 2), ends_ranks=True),
    "give-up": Kind(give_up, 1, hosts=(1, 2), ends_ranks=True),
    "stop": Kind(stop, 2, hosts=(1, 2)),
    "cut": Kind(cut, 2, hosts=(2,), needs_places=True),
    "lose": Kind(lose, 3, needs_link=True),
    "down": Kind(take_down, 3, needs_link=True),
    "users": Kind(functools.partial(users, hidepid=0), 1, needs_places=True),
    "hidepid-1": Kind(functools.partial(users, hidepid=1), 1, needs_places=True),
    "hidepid-2": Kind(functools.partial(users, hidepid=2), 1, needs_places=True),
    "reset": Kind(functools.partial(reset, whole=False), 2, needs_resets=True),
    "reset-all": Kind(functools.partial(reset, whole=True), 2, hosts=(2,), needs_resets=True, may_quarantine=True),
    "compete": Kind(compete, 2, hosts=(1, 2)),
    "reopen": Kind(reopen, 2, may_quarantine=True),
    "renew": Kind(renew, 2, hosts=(1, 2), may_quarantine=True),
    "alias": Kind(alias, 1),
    "execute": Kind(execute, 1),
    "disorder": Kind(disorder, 1, hosts=(1, 2)),
    "descriptors": Kind(descriptors, 1),
    "many-peers": Kind(many_peers, 1),
}
OVER_RDMA = ("kill", "give-up", "stop", "compete", "lose", "down", "renew")
"""The kinds that run over RDMA by default."""


def _replace(chaos: Chaos, rank: RankProcess, kind: str, place: Place | None = None) -> str:
    """Kill a rank and restart it. Returns where."""
    return _restart(chaos, rank, chaos.kill(rank), kind, place)


def _restart(chaos: Chaos, rank: RankProcess, address: str, kind: str, place: Place | None = None) -> str:
    """Restart a rank that was killed, at the same address or another. Returns which."""
    same = (rank.rank == 0 and rank.instance.tp > 1) or chaos.rng.random() < 0.5  # followers know their leader's address
    where = "same address" if same else "other address"
    chaos.report.faults[f"{kind}: {where}"] += 1
    chaos.report.victims.append(f"{rank.name}, {where}")
    chaos.restart(rank, address=address if same else "", place=place)
    return where


def _stop(chaos: Chaos, rank: RankProcess, seconds: float, kind: str, *, counted: bool = True) -> None:
    """Stop a rank for a time, and wait until all ranks are connected again, and stay so."""
    if counted:
        chaos.report.faults[kind] += 1
    rank.stop()
    chaos.wait(seconds)
    rank.go_on()
    what = f"{rank.name} stopped for {seconds:.1f} s ({kind})"
    chaos.heal(kind, what)
    chaos.wait(NOTICED_S)
    chaos.heal(f"{kind}: afterwards", what)
    chaos.stays_healed(what)


def _cpu_share(chaos: Chaos, rank: RankProcess) -> float:
    """The CPU time that a rank uses without requests, in cores."""
    times: list[tuple[float, float]] = []
    for seconds in (IDLE_S, 0.0):
        chaos.pump(chaos.states_satisfy(bool, [rank]), chaos.load.grace_s, f"{rank.name}: no answer")
        times.append((time.monotonic(), rank.state["cpu_s"]))
        time.sleep(seconds)  # `chaos.wait` asks for the state, which takes CPU time
    (began, cpu_before), (ended, cpu_after) = times
    return float(cpu_after - cpu_before) / (ended - began)
